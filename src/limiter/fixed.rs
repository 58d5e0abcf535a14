//! The fixed window: constant in size, counts from a client's first attempt.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::algorithm::{Algorithm, Verdict};
use super::decision::Decision;
use super::quota::Quota;
use super::{GRACE, check_cost};
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::vault::Row;

/// One quota, counted from the first admitted attempt on.
///
/// The window is not extended by refused checks, which record nothing. A client may use the end of
/// one window and the start of the next: up to twice the limit within one window's length. In
/// return a row is constant in size, and a limit may be as large as a `u32`.
///
/// ```
/// use ratevault::{FixedWindow, Limiter, Quota, Vault};
///
/// let vault = Vault::builder("uploads").in_memory().open()?;
/// let limiter = Limiter::new(vault, FixedWindow::new(Quota::per_day(1_000_000)?));
/// assert!(limiter.check_n("upload", "ada", 250_000)?.is_allowed());
/// # Ok::<(), ratevault::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FixedWindow {
    quota: Quota,
}

impl FixedWindow {
    /// At most the quota's limit in each window.
    #[must_use]
    pub const fn new(quota: Quota) -> Self {
        Self { quota }
    }

    /// The quota.
    #[must_use]
    pub const fn quota(&self) -> Quota {
        self.quota
    }

    /// `count` as it stands at `now`: dated back if it is ahead, fresh if its window is over.
    fn current(&self, count: WindowCount, now: Timestamp) -> WindowCount {
        let start = count.start.min(now.as_millis());
        let over = now >= self.quota.frees_at(start);
        if over || count.used == 0 {
            return WindowCount {
                start: now.as_millis(),
                used: 0,
            };
        }
        WindowCount { start, ..count }
    }

    fn report(&self, count: WindowCount, now: Timestamp) -> Decision {
        let reset_at = if count.used == 0 {
            now
        } else {
            self.quota.frees_at(count.start)
        };
        let limit = self.quota.limit();
        Decision::allowed(limit, limit.saturating_sub(count.used), now, reset_at)
    }
}

impl Algorithm for FixedWindow {
    type State = WindowCount;

    fn decide(&self, count: &mut WindowCount, now: Timestamp, cost: u32) -> Verdict {
        let ahead = count.used > 0 && count.start > now.as_millis();
        let mut next = self.current(*count, now);
        let after = next.used.saturating_add(cost);
        let allowed = after <= self.quota.limit();
        if allowed {
            next.used = after;
        }
        if allowed || ahead {
            *count = next;
        }
        Verdict {
            decision: match self.report(next, now) {
                report if allowed => report,
                report => report.refused_until(report.reset_at()),
            },
            write: allowed || ahead,
        }
    }

    fn peek(&self, count: &WindowCount, now: Timestamp) -> Decision {
        self.report(self.current(*count, now), now)
    }

    fn check_cost(&self, cost: u32) -> Result<()> {
        check_cost(cost, self.quota.limit())
    }

    fn ttl(&self) -> Duration {
        self.quota.window() + GRACE
    }

    fn cannot_panic(&self) -> bool {
        true
    }

    fn quotas(&self) -> &[Quota] {
        std::slice::from_ref(&self.quota)
    }
}

/// The quota's text: `5/minute`.
impl fmt::Display for FixedWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.quota.fmt(f)
    }
}

impl FromStr for FixedWindow {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        text.parse().map(Self::new)
    }
}

/// When a client's window started and what it used of it: the row of a fixed window.
///
/// Encoded as two integers: the start in ms since the Unix epoch, then the used places.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowCount {
    start: u64,
    /// 0: no window has started.
    used: u32,
}

impl Row for WindowCount {
    const KIND: &'static str = "fixed-window/1";
}

impl WindowCount {
    /// When the window started.
    #[must_use]
    pub const fn start(&self) -> Timestamp {
        Timestamp::from_millis(self.start)
    }

    /// How many places of it are used.
    #[must_use]
    pub const fn used(&self) -> u32 {
        self.used
    }
}
