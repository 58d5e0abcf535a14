//! The sliding-window log: every hit counts for exactly one window, to the millisecond.

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::algorithm::{Algorithm, Verdict};
use super::decision::Decision;
use super::quota::Quota;
use super::{GRACE, check_cost};
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::vault::Row;

/// The largest limit of a quota: the log keeps every hit.
pub(crate) const LARGEST_LIMIT: u32 = 100_000;

/// What a refused check leaves behind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Refusals {
    /// It counts like an admitted one: a client that keeps hammering stays out until it pauses.
    #[default]
    Count,
    /// It leaves nothing: a client that keeps hammering is let back in on schedule.
    Ignore,
}

/// A log of hits, and one or several quotas on it.
///
/// A hit at `t` counts for a quota at `now` while `now - t` is less than the window. The text form
/// is one or several quotas: `"5/minute; 100/day"`.
///
/// ```
/// use ratevault::{Quota, Refusals, SlidingWindow};
///
/// let window = SlidingWindow::new(Quota::per_minute(5)?)?
///     .and(Quota::per_day(100)?)?
///     .refusals(Refusals::Ignore);
/// assert_eq!(window.to_string(), "5/minute; 100/day");
/// # Ok::<(), ratevault::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlidingWindow {
    /// Invariant: at least one.
    quotas: Vec<Quota>,
    refusals: Refusals,
    longest_ms: u64,
    largest_limit: u32,
}

impl SlidingWindow {
    /// One quota; refused checks count.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidQuota`] if the limit is above 100,000: the log costs memory and disk per hit.
    pub fn new(quota: Quota) -> Result<Self> {
        let none = Self {
            quotas: Vec::new(),
            refusals: Refusals::default(),
            longest_ms: 0,
            largest_limit: 0,
        };
        none.and(quota)
    }

    /// A further quota on the same log. A check has to fit into every one.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn and(mut self, quota: Quota) -> Result<Self> {
        if quota.limit() > LARGEST_LIMIT {
            return Err(Error::InvalidQuota {
                quota: quota.to_string(),
                part: quota.limit().to_string(),
                reason: "is larger than the largest limit of a sliding window, 100000; use a fixed window",
            });
        }
        self.longest_ms = self.longest_ms.max(window_ms(&quota));
        self.largest_limit = self.largest_limit.max(quota.limit());
        self.quotas.push(quota);
        Ok(self)
    }

    /// What a refused check leaves behind. Default: [`Refusals::Count`], because hammering a login
    /// should not pay.
    #[must_use]
    pub fn refusals(mut self, refusals: Refusals) -> Self {
        self.refusals = refusals;
        self
    }

    fn smallest_limit(&self) -> u32 {
        let limits = self.quotas.iter().map(Quota::limit);
        limits.min().unwrap_or(u32::MAX)
    }

    /// The quota with the least remaining; of equals the later reset, of equals the first.
    fn report(&self, log: &HitLog, now: u64) -> Decision {
        let reports = self.kept(log, now).map(|kept| kept.report(now));
        let tightness = |report: &Decision| (report.remaining(), Reverse(report.reset_at()));
        let tighter = |best, next| {
            if tightness(&next) < tightness(&best) {
                next
            } else {
                best
            }
        };
        reports.reduce(tighter).unwrap_or(no_quota(now))
    }

    /// The quota that makes the client wait longest for `cost`; of equals the first.
    fn refuse(&self, log: &HitLog, now: u64, cost: u32) -> Decision {
        let refusals = self.kept(log, now).map(|kept| {
            let fits_at = kept.fits_at(cost, now);
            (fits_at, kept.report(now).refused_until(fits_at))
        });
        let longer = |best: (_, _), next: (_, _)| if next.0 > best.0 { next } else { best };
        refusals
            .reduce(longer)
            .map_or(no_quota(now), |(_, refusal)| refusal)
    }

    /// What counts for each quota at `now`.
    fn kept<'a>(&'a self, log: &'a HitLog, now: u64) -> impl Iterator<Item = Kept<'a>> {
        self.quotas.iter().map(move |quota| log.kept(quota, now))
    }
}

/// There is always a quota.
const fn no_quota(now: u64) -> Decision {
    let now = Timestamp::from_millis(now);
    Decision::allowed(0, 0, now, now)
}

fn window_ms(quota: &Quota) -> u64 {
    crate::clock::whole_millis(quota.window())
}

impl Algorithm for SlidingWindow {
    type State = HitLog;

    fn decide(&self, log: &mut HitLog, now: Timestamp, cost: u32) -> Verdict {
        let now = now.as_millis();
        let corrected = log.bring_back_to(now);
        log.forget_until(now, self.longest_ms);
        let allowed = self.kept(log, now).all(|kept| kept.fits(cost));
        let recorded = allowed || self.refusals == Refusals::Count;
        if recorded {
            log.append(now, cost, self.largest_limit);
        }
        Verdict {
            decision: if allowed {
                self.report(log, now)
            } else {
                self.refuse(log, now, cost)
            },
            write: recorded || corrected,
        }
    }

    fn peek(&self, log: &HitLog, now: Timestamp) -> Decision {
        let now = now.as_millis();
        if log.is_ahead_of(now) {
            let mut log = log.clone();
            log.bring_back_to(now);
            return self.report(&log, now);
        }
        self.report(log, now)
    }

    fn check_cost(&self, cost: u32) -> Result<()> {
        check_cost(cost, self.smallest_limit())
    }

    fn ttl(&self) -> Duration {
        Duration::from_millis(self.longest_ms) + GRACE
    }

    fn quotas(&self) -> &[Quota] {
        &self.quotas
    }
}

/// `"5/minute; 100/day"`.
impl fmt::Display for SlidingWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, quota) in self.quotas.iter().enumerate() {
            let separator = if position == 0 { "" } else { "; " };
            write!(f, "{separator}{quota}")?;
        }
        Ok(())
    }
}

impl FromStr for SlidingWindow {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut quotas = text.split("; ").map(str::parse);
        let first = Self::new(quotas.next().unwrap_or_else(|| "".parse())?)?;
        quotas.try_fold(first, |window, quota| window.and(quota?))
    }
}

/// The hits of one quota that count at some instant, the newest `limit` of them.
struct Kept<'a> {
    quota: &'a Quota,
    log: &'a HitLog,
    /// Where in the log the oldest kept hit stands.
    start: usize,
}

impl Kept<'_> {
    fn count(&self) -> usize {
        self.log.times.len() - self.start
    }

    fn remaining(&self) -> u32 {
        let kept = u32::try_from(self.count()).unwrap_or(u32::MAX);
        self.quota.limit().saturating_sub(kept)
    }

    fn report(&self, now: u64) -> Decision {
        let (limit, now_at) = (self.quota.limit(), Timestamp::from_millis(now));
        Decision::allowed(limit, self.remaining(), now_at, self.reset_at(now))
    }

    fn fits(&self, cost: u32) -> bool {
        self.remaining() >= cost
    }

    fn reset_at(&self, now: u64) -> Timestamp {
        match self.log.times.get(self.start) {
            Some(&oldest) => self.quota.frees_at(oldest),
            None => Timestamp::from_millis(now),
        }
    }

    /// When `cost` fits if nothing else happens: when enough of the oldest kept hits are gone.
    fn fits_at(&self, cost: u32, now: u64) -> Timestamp {
        let missing = cost.saturating_sub(self.remaining());
        let last_to_go = usize::try_from(missing)
            .ok()
            .and_then(|missing| missing.checked_sub(1))
            .and_then(|offset| self.log.times.get(self.start.saturating_add(offset)));
        match last_to_go {
            Some(&hit) => self.quota.frees_at(hit),
            None => Timestamp::from_millis(now),
        }
    }
}

/// The hit times of one (endpoint, client) pair: the row of a sliding window.
///
/// Encoded as a sequence of integers: the oldest time in ms since the Unix epoch, then the
/// differences from each time to the next.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HitLog {
    /// Invariant: ascending.
    times: VecDeque<u64>,
}

impl Row for HitLog {
    const KIND: &'static str = "sliding-log/1";
}

impl HitLog {
    /// The recorded hits, oldest first.
    pub fn times(&self) -> impl DoubleEndedIterator<Item = Timestamp> + ExactSizeIterator + '_ {
        self.times.iter().copied().map(Timestamp::from_millis)
    }

    /// The hits of `quota` that count at `now`.
    fn kept<'a>(&'a self, quota: &'a Quota, now: u64) -> Kept<'a> {
        let window = window_ms(quota);
        let counting = self.first_within(now, window);
        let limit = usize::try_from(quota.limit()).unwrap_or(usize::MAX);
        Kept {
            quota,
            log: self,
            start: counting.max(self.times.len().saturating_sub(limit)),
        }
    }

    /// Where the hits begin that are less than `window` old.
    fn first_within(&self, now: u64, window: u64) -> usize {
        self.times
            .partition_point(|&hit| now.saturating_sub(hit) >= window)
    }

    fn is_ahead_of(&self, now: u64) -> bool {
        self.times.back().is_some_and(|&newest| newest > now)
    }

    /// Takes times later than `now` as `now`: the clock was set back. Returns whether any was.
    fn bring_back_to(&mut self, now: u64) -> bool {
        let ahead = self.is_ahead_of(now);
        for hit in self.times.iter_mut().rev().take_while(|hit| **hit > now) {
            *hit = now;
        }
        ahead
    }

    fn forget_until(&mut self, now: u64, window: u64) {
        let gone = self.first_within(now, window);
        self.times.drain(..gone);
    }

    /// Appends `cost` hits at `now` and keeps the newest `limit` of all.
    fn append(&mut self, now: u64, cost: u32, limit: u32) {
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let cost = usize::try_from(cost).unwrap_or(usize::MAX).min(limit);
        let surplus = (self.times.len() + cost).saturating_sub(limit);
        self.times.drain(..surplus.min(self.times.len()));
        self.times.extend(std::iter::repeat_n(now, cost));
    }
}

impl Serialize for HitLog {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut previous = 0;
        let difference = |&hit: &u64| hit - std::mem::replace(&mut previous, hit);
        serializer.collect_seq(self.times.iter().map(difference))
    }
}

impl<'de> Deserialize<'de> for HitLog {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Differences;

        impl<'de> Visitor<'de> for Differences {
            type Value = HitLog;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("hit times: the first, then differences")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<HitLog, A::Error> {
                let overflow = || serde::de::Error::custom("a hit time past the end of time");
                let mut times = VecDeque::new();
                let mut hit = 0_u64;
                while let Some(difference) = seq.next_element::<u64>()? {
                    hit = hit.checked_add(difference).ok_or_else(overflow)?;
                    times.push_back(hit);
                }
                Ok(HitLog { times })
            }
        }

        deserializer.deserialize_seq(Differences)
    }
}
