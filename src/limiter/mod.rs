//! Limits: quotas, the pure algorithms that decide, and `Limiter`, which runs one over a vault.
//!
//! Deciding knows no I/O and no clock; `Limiter` gives it the state and the time that the vault
//! found inside one write transaction.

mod algorithm;
mod decision;
mod fixed;
mod gate;
mod quota;
mod sliding;
mod times;

use std::sync::Arc;
use std::time::Duration;

pub use algorithm::{Algorithm, Verdict};
pub use decision::Decision;
pub use fixed::{FixedWindow, WindowCount};
pub use gate::{Admission, AsyncGateFn, Gate, GateFn, IntoAdmission, async_gate_fn, gate_fn};
pub use quota::Quota;
pub use sliding::{HitLog, Refusals, SlidingWindow};

use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::vault::{Change, Client, ClientBytes, Key, KeyParts, Pending, Slot, Vault};

/// How much longer than its window a row is kept.
const GRACE: Duration = Duration::from_secs(1);

/// A cost must be at least 1 and fit into `limit`.
fn check_cost(cost: u32, limit: u32) -> Result<()> {
    if (1..=limit).contains(&cost) {
        Ok(())
    } else {
        Err(Error::InvalidCost { cost, limit })
    }
}

/// An algorithm over a table: one count for each (endpoint, client) pair.
///
/// Cheap to clone; clones share the counts. So do limiters over the same table, for the same
/// endpoint: a limiter keeps of a log what its own quotas need, so put several quotas on one count
/// with [`SlidingWindow::and`], or give each limiter endpoints of its own.
///
/// ```
/// use ratevault::{Limiter, Quota, SlidingWindow, Vault};
///
/// let vault = Vault::builder("rate_limits").in_memory().open()?;
/// let limiter = Limiter::new(vault, SlidingWindow::new(Quota::per_minute(5)?)?);
/// let decision = limiter.check("login", "203.0.113.7")?;
/// assert!(decision.is_allowed());
/// assert_eq!(decision.remaining(), 4);
/// # Ok::<(), ratevault::Error>(())
/// ```
#[derive(Debug)]
pub struct Limiter<A: Algorithm> {
    vault: Vault<A::State>,
    algorithm: Arc<A>,
}

impl<A: Algorithm> Clone for Limiter<A> {
    fn clone(&self) -> Self {
        Self {
            vault: self.vault.clone(),
            algorithm: Arc::clone(&self.algorithm),
        }
    }
}

impl<A: Algorithm> Limiter<A> {
    /// Runs `algorithm` over `vault`.
    pub fn new(vault: Vault<A::State>, algorithm: A) -> Self {
        Self {
            vault,
            algorithm: Arc::new(algorithm),
        }
    }

    /// The table the counts are kept in.
    pub const fn vault(&self) -> &Vault<A::State> {
        &self.vault
    }

    /// The algorithm that decides.
    pub fn algorithm(&self) -> &A {
        &self.algorithm
    }

    /// Blocks until one check of cost 1 is decided and on disk.
    ///
    /// # Errors
    ///
    /// Those of [`Vault::update`], and [`Error::EndpointTooLong`]. A refusal is not an error.
    #[inline]
    pub fn check<'c>(&self, endpoint: &str, client: impl Into<Client<'c>>) -> Result<Decision> {
        self.check_n(endpoint, client, 1)
    }

    /// Blocks until one check of `cost` places is decided and on disk. All of it fits or none.
    ///
    /// # Errors
    ///
    /// Those of [`check`](Self::check), and [`Error::InvalidCost`] if `cost` is 0 or can never fit.
    #[inline]
    pub fn check_n<'c>(
        &self,
        endpoint: &str,
        client: impl Into<Client<'c>>,
        cost: u32,
    ) -> Result<Decision> {
        self.algorithm.check_cost(cost)?;
        let client = client.into();
        match self.check_in_memory(endpoint, client, cost)? {
            Some(decision) => Ok(decision),
            None => self.check_in_file(endpoint, client, cost),
        }
    }

    /// The decision, whatever that takes.
    #[inline(never)]
    fn check_in_file(&self, endpoint: &str, client: Client<'_>, cost: u32) -> Result<Decision> {
        let key = Key::new(endpoint, client)?;
        self.vault.update(&key, self.step(cost))
    }

    /// As [`check`](Self::check), without blocking; on any executor.
    ///
    /// The check counts from this call on: dropping the future does not take it back.
    pub fn check_async<'c>(
        &self,
        endpoint: &str,
        client: impl Into<Client<'c>>,
    ) -> Pending<Decision> {
        self.check_n_async(endpoint, client, 1)
    }

    /// As [`check_n`](Self::check_n), without blocking; on any executor.
    ///
    /// The check counts from this call on: dropping the future does not take it back.
    pub fn check_n_async<'c>(
        &self,
        endpoint: &str,
        client: impl Into<Client<'c>>,
        cost: u32,
    ) -> Pending<Decision> {
        let checked = self.algorithm.check_cost(cost);
        match checked.and_then(|()| Key::new(endpoint, client)) {
            Ok(key) => self.check_key(&key, cost, |decision| decision),
            Err(error) => Pending::failed(error),
        }
    }

    /// What a check would find, as if it were allowed. Records nothing, waits for no one.
    ///
    /// # Errors
    ///
    /// Those of [`Vault::get`], and [`Error::EndpointTooLong`].
    pub fn peek<'c>(&self, endpoint: &str, client: impl Into<Client<'c>>) -> Result<Decision> {
        let peek = |state: Option<&A::State>, now| match state {
            Some(state) => self.algorithm.peek(state, now),
            None => self.algorithm.peek(&A::State::default(), now),
        };
        self.vault.look(&Key::new(endpoint, client)?, peek)
    }

    /// Blocks until the pair is forgotten on disk, also if its row is damaged.
    ///
    /// # Errors
    ///
    /// Those of [`Vault::remove`], and [`Error::EndpointTooLong`].
    pub fn reset<'c>(&self, endpoint: &str, client: impl Into<Client<'c>>) -> Result<()> {
        let key = Key::new(endpoint, client)?;
        self.vault.remove(&key).map(drop)
    }

    /// Blocks until every client of `endpoint` is forgotten on disk, and says how many there were.
    ///
    /// At most 1,000 rows go in one transaction, so that others are served meanwhile. A client that
    /// is checked meanwhile may be counted anew.
    ///
    /// # Errors
    ///
    /// Those of [`Vault::remove_endpoint`].
    pub fn reset_endpoint(&self, endpoint: &str) -> Result<u64> {
        self.vault.remove_endpoint(endpoint)
    }

    /// The decision, if all it needs is in memory, and deciding needs no precautions.
    #[inline(always)]
    fn check_in_memory(
        &self,
        endpoint: &str,
        client: Client<'_>,
        cost: u32,
    ) -> Result<Option<Decision>> {
        if !self.vault.is_buffered() || !self.algorithm.cannot_panic() {
            return Ok(None);
        }
        let client = ClientBytes::of(client);
        let key = KeyParts::new(endpoint, &client)?;
        Ok(self.decide_in_memory(key, cost))
    }

    #[inline(always)]
    fn decide_in_memory(&self, key: KeyParts<'_>, cost: u32) -> Option<Decision> {
        let decide = Decide {
            algorithm: &*self.algorithm,
            cost,
        };
        self.vault.change_in_memory(key, decide)
    }

    /// Checks without blocking, and makes `R` of the decision. The cost was checked.
    fn check_key<R: Send + 'static>(
        &self,
        key: &Key,
        cost: u32,
        of: impl FnOnce(Decision) -> R + Send + 'static,
    ) -> Pending<R> {
        let mut decision = None;
        if self.algorithm.cannot_panic() {
            decision = self.decide_in_memory(key.parts(), cost);
        }
        if let Some(decision) = decision {
            return Pending::done(Ok(of(decision)));
        }
        let step = self.step(cost);
        self.vault.update_async(key, |slot| of(step(slot)))
    }

    /// What one check does to its row.
    fn step(&self, cost: u32) -> impl FnOnce(&mut Slot<A::State>) -> Decision + Send + use<A> {
        let algorithm = Arc::clone(&self.algorithm);
        move |slot| {
            let now = slot.now();
            let state = slot.state(algorithm.cannot_panic());
            let verdict = algorithm.decide(state, now, cost);
            if verdict.write {
                slot.renew(algorithm.ttl());
            }
            verdict.decision
        }
    }
}

/// One check of a row that is in memory.
struct Decide<'a, A> {
    algorithm: &'a A,
    cost: u32,
}

impl<A: Algorithm> Change<A::State> for Decide<'_, A> {
    type Answer = Decision;

    #[inline(always)]
    fn apply(self, state: &mut A::State, now: Timestamp) -> (Decision, Option<Duration>) {
        let verdict = self.algorithm.decide(state, now, self.cost);
        let ttl = verdict.write.then(|| self.algorithm.ttl());
        (verdict.decision, ttl)
    }
}
