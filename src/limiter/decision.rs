//! `Decision`: what a limiter answers.

use std::time::Duration;

use crate::clock::{Timestamp, seconds_rounded_up};

/// What a check was answered, and what the caller may tell the client.
///
/// With several quotas it speaks of one: of an admitted check the one with the least remaining, of
/// a refused one the one that makes the client wait longest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    limit: u32,
    remaining: u32,
    now: Timestamp,
    reset_at: Timestamp,
    /// `None`: allowed. Else the instant at which the same cost fits.
    fits_at: Option<Timestamp>,
}

impl Decision {
    /// An admitted check: `remaining` of `limit` places are left after it, at `now`, and the next
    /// one comes free at `reset_at`.
    #[must_use]
    pub const fn allowed(limit: u32, remaining: u32, now: Timestamp, reset_at: Timestamp) -> Self {
        Self {
            limit,
            remaining,
            now,
            reset_at,
            fits_at: None,
        }
    }

    /// This decision as a refusal: the same cost fits at `fits_at`.
    #[must_use]
    pub const fn refused_until(self, fits_at: Timestamp) -> Self {
        Self {
            fits_at: Some(fits_at),
            ..self
        }
    }

    /// Whether the check was admitted. A peek always is.
    #[must_use]
    pub const fn is_allowed(&self) -> bool {
        self.fits_at.is_none()
    }

    /// How many hits the quota admits per window.
    #[must_use]
    pub const fn limit(&self) -> u32 {
        self.limit
    }

    /// How many places are left after this check.
    #[must_use]
    pub const fn remaining(&self) -> u32 {
        self.remaining
    }

    /// When the next place comes free; the instant of the check if all are.
    #[must_use]
    pub const fn reset_at(&self) -> Timestamp {
        self.reset_at
    }

    /// From the check to [`reset_at`](Self::reset_at), in whole ms.
    #[must_use]
    pub const fn reset_after(&self) -> Duration {
        self.reset_at.saturating_since(self.now)
    }

    /// How long a refused client has to wait until the same cost fits, in whole ms.
    ///
    /// A client that waits exactly that long is admitted, if nothing else happens meanwhile.
    /// `None` if the check was admitted.
    #[must_use]
    pub fn wait(&self) -> Option<Duration> {
        self.fits_at
            .map(|fits_at| fits_at.saturating_since(self.now))
    }

    /// [`wait`](Self::wait) in whole seconds, rounded up and at least 1: the value of the header
    /// `Retry-After` ([RFC 9110, 10.2.3](https://www.rfc-editor.org/rfc/rfc9110#section-10.2.3)).
    #[must_use]
    pub fn retry_after(&self) -> Option<u64> {
        self.wait().map(|wait| seconds_rounded_up(wait).max(1))
    }
}
