//! `Gate`: what a middleware asks before it lets a request through.
//!
//! [`Limiter`] is one; closures become one with [`gate_fn`] and [`async_gate_fn`].

use std::error::Error as StdError;
use std::fmt;
use std::future::{Future, Ready, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use super::{Algorithm, Decision, Limiter, Quota};
use crate::clock::Timestamp;
use crate::error::{Cause, Error, Result};
use crate::vault::{Key, Pending};

/// Whatever decides about one request: a [`Limiter`], or a closure through [`gate_fn`] or
/// [`async_gate_fn`].
pub trait Gate: Send + Sync + 'static {
    /// The wait for the answer, on any executor.
    type Future: Future<Output = Result<Admission>> + Send + 'static;

    /// Asks whether `key` may take `cost` places. Does not block.
    ///
    /// What it counts, it counts from this call on: dropping the future takes nothing back.
    fn admit(&self, key: Key, cost: u32) -> Self::Future;

    /// What it enforces, for those who announce it. Default: nothing is known.
    fn quotas(&self) -> &[Quota] {
        &[]
    }

    /// The instant `at` of its decisions, by the wall clock. Default: they are dated by it.
    fn wall(&self, at: Timestamp) -> Timestamp {
        at
    }
}

/// What a [`Gate`] answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Admission {
    /// A limiter has counted.
    Decided(Decision),
    /// Admitted; there are no numbers.
    Admitted,
    /// Refused; there are no numbers but how long to wait, if that is known.
    Refused {
        /// How long the client should wait.
        retry_after: Option<Duration>,
    },
}

impl From<Decision> for Admission {
    fn from(decision: Decision) -> Self {
        Self::Decided(decision)
    }
}

impl From<bool> for Admission {
    fn from(admitted: bool) -> Self {
        if admitted {
            Self::Admitted
        } else {
            Self::Refused { retry_after: None }
        }
    }
}

impl<A: Algorithm> Gate for Limiter<A> {
    type Future = Pending<Admission>;

    fn admit(&self, key: Key, cost: u32) -> Pending<Admission> {
        if let Err(error) = self.algorithm.check_cost(cost) {
            return Pending::failed(error);
        }
        self.check_key(&key, cost, Admission::Decided)
    }

    fn quotas(&self) -> &[Quota] {
        self.algorithm.quotas()
    }

    fn wall(&self, at: Timestamp) -> Timestamp {
        self.vault.wall(at)
    }
}

impl<G: Gate> Gate for Arc<G> {
    type Future = G::Future;

    fn admit(&self, key: Key, cost: u32) -> Self::Future {
        (**self).admit(key, cost)
    }

    fn quotas(&self) -> &[Quota] {
        (**self).quotas()
    }

    fn wall(&self, at: Timestamp) -> Timestamp {
        (**self).wall(at)
    }
}

/// What a closure may answer to be a gate: a `bool`, a [`Decision`], an [`Admission`], or a
/// `Result` of one of them.
pub trait IntoAdmission {
    /// The answer.
    ///
    /// # Errors
    ///
    /// The closure's own, as [`Error::Limiter`] unless it is an [`Error`] already.
    fn into_admission(self) -> Result<Admission>;
}

impl IntoAdmission for bool {
    fn into_admission(self) -> Result<Admission> {
        Ok(self.into())
    }
}

impl IntoAdmission for Decision {
    fn into_admission(self) -> Result<Admission> {
        Ok(self.into())
    }
}

impl IntoAdmission for Admission {
    fn into_admission(self) -> Result<Admission> {
        Ok(self)
    }
}

impl<T, E> IntoAdmission for Result<T, E>
where
    T: IntoAdmission,
    E: Into<Box<dyn StdError + Send + Sync>>,
{
    fn into_admission(self) -> Result<Admission> {
        match self {
            Ok(answer) => answer.into_admission(),
            Err(error) => Err(match error.into().downcast::<Error>() {
                Ok(error) => *error,
                Err(error) => Error::Limiter {
                    source: Cause::new(error),
                },
            }),
        }
    }
}

/// A gate from a closure that answers at once. It must not block: it runs in the request's task.
///
/// A `bool` has no numbers, so a response shows no `x-ratelimit-*`, and a refusal a `retry-after`
/// only if [`GateFn::retry_after`] was given.
///
/// ```
/// use ratevault::gate_fn;
/// use std::time::Duration;
///
/// let gate = gate_fn(|key, _cost| key.endpoint() != "closed").retry_after(Duration::from_secs(30));
/// # let _ = gate;
/// ```
pub const fn gate_fn<F, T>(closure: F) -> GateFn<F>
where
    F: Fn(&Key, u32) -> T + Send + Sync + 'static,
    T: IntoAdmission,
{
    GateFn {
        closure,
        retry_after: None,
    }
}

/// A gate from a closure that returns a future. The closure must not block.
///
/// ```
/// use ratevault::async_gate_fn;
///
/// # async fn ask(_client: String) -> std::io::Result<bool> { Ok(true) }
/// let gate = async_gate_fn(|key, _cost| ask(key.client().to_string()));
/// # let _ = gate;
/// ```
pub const fn async_gate_fn<F, R>(closure: F) -> AsyncGateFn<F>
where
    F: Fn(Key, u32) -> R + Send + Sync + 'static,
    R: Future + Send + 'static,
    R::Output: IntoAdmission,
{
    AsyncGateFn {
        closure,
        retry_after: None,
    }
}

/// A [`Gate`] made by [`gate_fn`].
#[derive(Clone, Copy)]
pub struct GateFn<F> {
    closure: F,
    retry_after: Option<Duration>,
}

/// A [`Gate`] made by [`async_gate_fn`].
#[derive(Clone, Copy)]
pub struct AsyncGateFn<F> {
    closure: F,
    retry_after: Option<Duration>,
}

impl<F> GateFn<F> {
    /// How long a client should wait if the closure does not say. Default: not told.
    #[must_use]
    pub const fn retry_after(mut self, wait: Duration) -> Self {
        self.retry_after = Some(wait);
        self
    }
}

impl<F> AsyncGateFn<F> {
    /// How long a client should wait if the closure does not say. Default: not told.
    #[must_use]
    pub const fn retry_after(mut self, wait: Duration) -> Self {
        self.retry_after = Some(wait);
        self
    }
}

impl<F, T> Gate for GateFn<F>
where
    F: Fn(&Key, u32) -> T + Send + Sync + 'static,
    T: IntoAdmission,
{
    type Future = Ready<Result<Admission>>;

    fn admit(&self, key: Key, cost: u32) -> Self::Future {
        let answer = (self.closure)(&key, cost).into_admission();
        ready(answer.map(|admission| admission.or_after(self.retry_after)))
    }
}

impl<F, R> Gate for AsyncGateFn<F>
where
    F: Fn(Key, u32) -> R + Send + Sync + 'static,
    R: Future + Send + 'static,
    R::Output: IntoAdmission,
{
    type Future = Pin<Box<dyn Future<Output = Result<Admission>> + Send>>;

    fn admit(&self, key: Key, cost: u32) -> Self::Future {
        let (asked, wait) = ((self.closure)(key, cost), self.retry_after);
        Box::pin(async move {
            let answer = asked.await.into_admission();
            answer.map(|admission| admission.or_after(wait))
        })
    }
}

impl Admission {
    /// This answer, with `wait` where a refusal does not say how long.
    const fn or_after(self, wait: Option<Duration>) -> Self {
        match self {
            Self::Refused { retry_after: None } => Self::Refused { retry_after: wait },
            said => said,
        }
    }
}

impl<F> fmt::Debug for GateFn<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GateFn")
            .field("retry_after", &self.retry_after)
            .finish_non_exhaustive()
    }
}

impl<F> fmt::Debug for AsyncGateFn<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncGateFn")
            .field("retry_after", &self.retry_after)
            .finish_non_exhaustive()
    }
}
