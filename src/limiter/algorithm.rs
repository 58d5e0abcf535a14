//! `Algorithm`: deciding is a function of values. No I/O, no clock.

use std::fmt;
use std::time::Duration;

use super::decision::Decision;
use super::quota::Quota;
use crate::clock::Timestamp;
use crate::error::Result;
use crate::vault::Row;

/// How a limiter decides: a deterministic function of state, time and cost.
///
/// ```
/// use ratevault::{Algorithm, Quota, SlidingWindow, Timestamp};
///
/// let window = SlidingWindow::new(Quota::per_minute(1)?)?;
/// let mut state = Default::default();
/// let first = window.decide(&mut state, Timestamp::from_millis(0), 1);
/// let second = window.decide(&mut state, Timestamp::from_millis(1), 1);
/// assert!(first.decision.is_allowed());
/// assert!(!second.decision.is_allowed());
/// # Ok::<(), ratevault::Error>(())
/// ```
pub trait Algorithm: fmt::Debug + Send + Sync + 'static {
    /// What is kept for each (endpoint, client) pair.
    type State: Row + Default;

    /// Decides a check of `cost` at `now` and updates `state` accordingly.
    ///
    /// `cost` has passed [`check_cost`](Self::check_cost); any other is decided without a panic.
    fn decide(&self, state: &mut Self::State, now: Timestamp, cost: u32) -> Verdict;

    /// What a check would find at `now`, reported as if allowed.
    fn peek(&self, state: &Self::State, now: Timestamp) -> Decision;

    /// Refuses a cost that is 0 or can never fit.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidCost`](crate::Error::InvalidCost).
    fn check_cost(&self, cost: u32) -> Result<()>;

    /// How long a state matters after its last write.
    fn ttl(&self) -> Duration;

    /// Whether [`decide`](Self::decide) never panics: then no copy of a state that is only in memory
    /// has to be kept to fall back on. Default: false.
    fn cannot_panic(&self) -> bool {
        false
    }

    /// What it enforces, for those who announce it.
    fn quotas(&self) -> &[Quota];
}

/// What [`Algorithm::decide`] answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// The answer to the caller.
    pub decision: Decision,
    /// Whether the state changed, so that it has to be stored.
    pub write: bool,
}
