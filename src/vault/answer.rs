//! `Answer`: a caller's wait for the writer, on a thread or in a task.

use std::future::{Future, IntoFuture};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use super::timer::Alarm;
use crate::error::{Applied, Cause, Error, Result};

/// What an operation yields: a result, a panic of the caller's closure, or an error.
pub(super) type Answered<R> = Result<std::thread::Result<R>>;

/// The receiving end of one operation.
#[derive(Debug)]
pub(super) struct Answer<R> {
    receiver: oneshot::Receiver<Answered<R>>,
    path: Arc<Path>,
    timeout: Option<Duration>,
}

impl<R> Answer<R> {
    pub(super) fn new(
        receiver: oneshot::Receiver<Answered<R>>,
        path: Arc<Path>,
        timeout: Option<Duration>,
    ) -> Self {
        Self {
            receiver,
            path,
            timeout,
        }
    }

    /// Blocks until the answer is there, or the timeout has passed.
    pub(super) fn wait(self) -> Result<R> {
        let received = match self.timeout {
            None => self.receiver.recv().map_err(|_| None),
            Some(timeout) => self
                .receiver
                .recv_timeout(timeout)
                .map_err(|error| (error == oneshot::RecvTimeoutError::Timeout).then_some(timeout)),
        };
        match received {
            Ok(answered) => unwrap_answered(answered),
            Err(Some(timeout)) => Err(too_slow(&self.path, timeout)),
            Err(None) => Err(never(&self.path)),
        }
    }
}

/// What a call without blocking returns: a future of its result, on any executor.
///
/// The operation was queued when this was made: dropping it does not take it back. Once it has given
/// its result it is pending for ever.
#[derive(Debug)]
#[must_use = "the operation was queued, but its result comes only when this is awaited"]
pub struct Pending<R>(State<R>);

#[derive(Debug)]
enum State<R> {
    Waiting {
        receiver: oneshot::AsyncReceiver<Answered<R>>,
        path: Arc<Path>,
        alarm: Option<(Duration, Alarm)>,
    },
    /// There is nothing to wait for; `None` once it was said.
    Ready(Option<Answered<R>>),
}

impl<R> Pending<R> {
    pub(crate) const fn failed(error: Error) -> Self {
        Self::ready(Err(error))
    }

    pub(crate) fn done(result: Result<R>) -> Self {
        Self::ready(result.map(Ok))
    }

    pub(super) const fn ready(answered: Answered<R>) -> Self {
        Self(State::Ready(Some(answered)))
    }
}

impl<R> From<Result<Answer<R>>> for Pending<R> {
    fn from(queued: Result<Answer<R>>) -> Self {
        match queued {
            Ok(answer) => Self(State::Waiting {
                receiver: answer.receiver.into_future(),
                path: answer.path,
                alarm: answer.timeout.map(|timeout| (timeout, Alarm::new(timeout))),
            }),
            Err(error) => Self::failed(error),
        }
    }
}

impl<R> Future for Pending<R> {
    type Output = Result<R>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<R>> {
        let (receiver, path, alarm) = match &mut self.0 {
            State::Waiting {
                receiver,
                path,
                alarm,
            } => (receiver, path, alarm),
            State::Ready(answered) => {
                let answered = answered.take();
                return answered.map_or(Poll::Pending, |a| Poll::Ready(unwrap_answered(a)));
            }
        };
        let result = match (Pin::new(receiver).poll(context), alarm) {
            (Poll::Ready(Ok(answered)), _) => Ok(answered),
            (Poll::Ready(Err(_)), _) => Err(never(path)),
            (Poll::Pending, None) => return Poll::Pending,
            (Poll::Pending, Some((timeout, alarm))) => {
                if !alarm.has_rung(context) {
                    return Poll::Pending;
                }
                Err(too_slow(path, *timeout))
            }
        };
        self.0 = State::Ready(None);
        Poll::Ready(result.and_then(unwrap_answered))
    }
}

// No part of it is ever pinned in place.
impl<R> Unpin for Pending<R> {}

/// A panic of the caller's closure goes on in the caller.
pub(super) fn unwrap_answered<R>(answered: Answered<R>) -> Result<R> {
    answered?.map_or_else(|panic| std::panic::resume_unwind(panic), Ok)
}

fn too_slow(path: &Path, timeout: Duration) -> Error {
    Error::Unavailable {
        path: path.to_owned(),
        applied: Applied::Unknown,
        source: Cause::new(format!("no answer within {timeout:?}; the disk may hang")),
    }
}

fn never(path: &Path) -> Error {
    Error::Unavailable {
        path: path.to_owned(),
        applied: Applied::Unknown,
        source: Cause::new("the writer ended without an answer"),
    }
}
