//! The queue in front of the writer: bounded, in order, and the one place that says whether a file
//! takes work.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::operation::Operation;
use crate::clock::ClockWaiter;
use crate::error::Cause;

/// How many operations may wait.
pub(super) const QUEUE_LIMIT: usize = 16_384;

/// How many operations one transaction carries.
const BATCH_LIMIT: usize = 1_000;

type Queued = Box<dyn Operation>;

#[derive(Default)]
pub(super) struct Queue {
    state: Mutex<State>,
    ready: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Queued>,
    /// Why the storage takes no work at the moment.
    failing: Option<Cause>,
    closing: bool,
    nudged: bool,
    woken: bool,
}

/// Why an operation is not taken.
#[derive(Debug)]
pub(super) enum Refused {
    Full,
    Failing(Cause),
    Closing,
}

/// What the writer is to do next.
pub(super) enum Work {
    /// Apply these.
    Batch(Vec<Queued>),
    /// Look around: the clock was moved, or a reader met a fault.
    Look,
    /// The time it wanted to wait has passed.
    Due,
    /// There is something to wait for that there was not before.
    Wake,
    /// Everything is done and nothing more will come.
    Close,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn push(&self, operation: Queued) -> Result<(), Refused> {
        let mut state = self.lock();
        if state.closing {
            return Err(Refused::Closing);
        }
        if let Some(cause) = &state.failing {
            return Err(Refused::Failing(cause.clone()));
        }
        if state.waiting.len() >= QUEUE_LIMIT {
            return Err(Refused::Full);
        }
        state.waiting.push_back(operation);
        drop(state);
        self.ready.notify_one();
        Ok(())
    }

    /// Blocks until there is work, or `patience` has passed.
    pub(super) fn next(&self, patience: Option<Duration>) -> Work {
        let mut state = self.lock();
        loop {
            if !state.waiting.is_empty() {
                return Work::Batch(state.take(BATCH_LIMIT).collect());
            }
            if state.closing {
                return Work::Close;
            }
            if std::mem::take(&mut state.nudged) {
                return Work::Look;
            }
            if std::mem::take(&mut state.woken) {
                return Work::Wake;
            }
            match patience {
                None => {
                    let woken = self.ready.wait(state);
                    state = woken.unwrap_or_else(PoisonError::into_inner);
                }
                Some(Duration::ZERO) => return Work::Due,
                Some(patience) => {
                    let woken = self.ready.wait_timeout(state, patience);
                    let (woken, timeout) = woken.unwrap_or_else(PoisonError::into_inner);
                    state = woken;
                    if timeout.timed_out() && state.is_idle() {
                        return Work::Due;
                    }
                }
            }
        }
    }

    /// Adds what has come meanwhile to a batch that is not committed yet. Says whether there was any.
    pub(super) fn board(&self, batch: &mut Vec<Queued>) -> bool {
        let room = match batch.last() {
            Some(last) if last.is_bulk() => 0,
            _ => BATCH_LIMIT.saturating_sub(batch.len()),
        };
        let mut state = self.lock();
        let before = batch.len();
        batch.extend(state.take(room));
        batch.len() > before
    }

    /// Turns all work away until [`recovered`](Self::recovered), and hands out what waits.
    pub(super) fn fail(&self, cause: Cause) -> Vec<Queued> {
        let mut state = self.lock();
        state.failing = Some(cause);
        state.waiting.drain(..).collect()
    }

    pub(super) fn recovered(&self) {
        self.lock().failing = None;
    }

    /// Why no work is taken, if it is not because the file is closed.
    pub(super) fn failing(&self) -> Option<Cause> {
        self.lock().failing.clone()
    }

    /// No new work; what waits is still done.
    pub(super) fn close(&self) {
        self.lock().closing = true;
        self.ready.notify_all();
    }

    pub(super) fn is_closing(&self) -> bool {
        self.lock().closing
    }

    /// Blocks for `pause`, or less if the queue is closed meanwhile. Says whether it is.
    pub(super) fn pause(&self, pause: Duration) -> bool {
        let state = self.lock();
        let woken = self
            .ready
            .wait_timeout_while(state, pause, |state| !state.closing);
        woken.unwrap_or_else(PoisonError::into_inner).0.closing
    }

    /// Has the writer ask itself anew how long it may wait.
    pub(super) fn wake(&self) {
        self.lock().woken = true;
        self.ready.notify_all();
    }

    /// Has the writer look at its file and its clock.
    pub(super) fn nudge(&self) {
        self.lock().nudged = true;
        self.ready.notify_all();
    }
}

impl State {
    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && !self.closing && !self.nudged && !self.woken
    }

    /// Takes up to `room` operations, none after one that fills a transaction on its own.
    fn take(&mut self, room: usize) -> impl Iterator<Item = Queued> + '_ {
        let bulk = self
            .waiting
            .iter()
            .take(room)
            .position(|work| work.is_bulk());
        let count = bulk.map_or(room, |bulk| bulk + 1);
        self.waiting.drain(..count.min(self.waiting.len()))
    }
}

impl ClockWaiter for Queue {
    fn clock_moved(&self) {
        self.nudge();
    }
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.lock();
        f.debug_struct("Queue")
            .field("waiting", &state.waiting.len())
            .field("failing", &state.failing)
            .field("closing", &state.closing)
            .finish()
    }
}
