//! The sliding-window log: every hit counts for exactly one window, to the millisecond.

use std::cmp::Reverse;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::de::{SeqAccess, Visitor};
use serde::ser::SerializeSeq;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::algorithm::{Algorithm, Verdict};
use super::decision::Decision;
use super::quota::Quota;
use super::times::Times;
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
    ttl: Duration,
    smallest_limit: u32,
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
            ttl: GRACE,
            smallest_limit: u32::MAX,
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
        self.longest_ms = self.longest_ms.max(quota.window_ms());
        self.ttl = Duration::from_millis(self.longest_ms) + GRACE;
        self.smallest_limit = self.smallest_limit.min(quota.limit());
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

    /// What is told of `now`, at which a check of the cost `refused` did not fit, if that is given.
    ///
    /// It is put together in one place: a decision that is handed on from several is copied on the
    /// way, and that is a good part of what deciding costs.
    #[inline(always)]
    fn tell(&self, log: &HitLog, now: u64, refused: Option<u32>) -> Decision {
        let quota = match &*self.quotas {
            [quota] => Some(quota),
            quotas => quotas.get(self.told_of(log, now, refused)),
        };
        let Some(kept) = quota.map(|quota| log.kept(quota, now)) else {
            // There is always a quota.
            let now = Timestamp::from_millis(now);
            return Decision::allowed(0, 0, now, now);
        };
        let report = kept.report(now);
        match refused {
            Some(cost) => report.refused_until(kept.fits_at(cost, now)),
            None => report,
        }
    }

    /// The position of the quota that is told of: the one with the least remaining, of equals the
    /// later reset; of a check that was refused the one that makes the client wait longest. Of equals
    /// the first.
    #[inline(never)]
    fn told_of(&self, log: &HitLog, now: u64, refused: Option<u32>) -> usize {
        let kept = self.kept(log, now).enumerate();
        let told = match refused {
            Some(cost) => kept.min_by_key(|(_, kept)| Reverse(kept.fits_at(cost, now))),
            None => kept.min_by_key(|(_, kept)| (kept.remaining(), Reverse(kept.reset_at(now)))),
        };
        told.map_or(0, |(position, _)| position)
    }

    /// What counts for each quota at `now`.
    #[inline(always)]
    fn kept<'a>(&'a self, log: &'a HitLog, now: u64) -> impl Iterator<Item = Kept<'a>> {
        self.quotas.iter().map(move |quota| log.kept(quota, now))
    }
}

impl Algorithm for SlidingWindow {
    type State = HitLog;

    #[inline(always)]
    fn decide(&self, log: &mut HitLog, now: Timestamp, cost: u32) -> Verdict {
        let now = now.as_millis();
        let corrected = log.bring_back_to(now);
        log.forget_until(now, self.longest_ms);
        let allowed = match &*self.quotas {
            [quota] => log.kept(quota, now).fits(cost),
            _ => self.kept(log, now).all(|kept| kept.fits(cost)),
        };
        let recorded = allowed || self.refusals == Refusals::Count;
        if recorded {
            log.append(now, cost, self.largest_limit);
        }
        Verdict {
            decision: self.tell(log, now, (!allowed).then_some(cost)),
            write: recorded || corrected,
        }
    }

    fn peek(&self, log: &HitLog, now: Timestamp) -> Decision {
        let now = now.as_millis();
        if log.is_ahead_of(now) {
            let mut log = log.clone();
            log.bring_back_to(now);
            return self.tell(&log, now, None);
        }
        self.tell(log, now, None)
    }

    fn check_cost(&self, cost: u32) -> Result<()> {
        check_cost(cost, self.smallest_limit)
    }

    fn ttl(&self) -> Duration {
        self.ttl
    }

    fn cannot_panic(&self) -> bool {
        true
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
    #[inline(always)]
    fn count(&self) -> usize {
        self.log.times.len() - self.start
    }

    #[inline(always)]
    fn remaining(&self) -> u32 {
        let kept = u32::try_from(self.count()).unwrap_or(u32::MAX);
        self.quota.limit().saturating_sub(kept)
    }

    #[inline(always)]
    fn report(&self, now: u64) -> Decision {
        let (limit, now_at) = (self.quota.limit(), Timestamp::from_millis(now));
        Decision::allowed(limit, self.remaining(), now_at, self.reset_at(now))
    }

    #[inline(always)]
    fn fits(&self, cost: u32) -> bool {
        self.remaining() >= cost
    }

    #[inline(always)]
    fn reset_at(&self, now: u64) -> Timestamp {
        match self.log.times.get(self.start) {
            Some(oldest) => self.quota.frees_at(oldest),
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
            Some(hit) => self.quota.frees_at(hit),
            None => Timestamp::from_millis(now),
        }
    }
}

/// The hit times of one (endpoint, client) pair: the row of a sliding window.
///
/// Encoded as a sequence of integers: the oldest time in ms since the Unix epoch, then the
/// differences from each time to the next. Shorter, if many times are equal: 2^64 - 1, which is no
/// time that another may follow; then of each time, how much later it is than the one before, and
/// how often it is there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HitLog {
    times: Times,
}

impl Row for HitLog {
    const KIND: &'static str = "sliding-log/1";

    fn memory(&self) -> usize {
        self.times.memory()
    }

    fn copy(&self) -> Option<Self> {
        (self.times.different() >= WORTH_COPYING).then(|| self.clone())
    }
}

/// A log of so many different times is copied in less time than it is encoded.
const WORTH_COPYING: usize = 64;

impl HitLog {
    /// The recorded hits, oldest first.
    pub fn times(&self) -> impl DoubleEndedIterator<Item = Timestamp> + ExactSizeIterator + '_ {
        let time = |position| self.times.get(position).unwrap_or_default();
        (0..self.times.len()).map(time).map(Timestamp::from_millis)
    }

    /// The hits of `quota` that count at `now`.
    #[inline(always)]
    fn kept<'a>(&'a self, quota: &'a Quota, now: u64) -> Kept<'a> {
        let window = quota.window_ms();
        let counting = self.first_within(now, window);
        let limit = usize::try_from(quota.limit()).unwrap_or(usize::MAX);
        Kept {
            quota,
            log: self,
            start: counting.max(self.times.len().saturating_sub(limit)),
        }
    }

    /// Where the hits begin that are less than `window` old.
    #[inline(always)]
    fn first_within(&self, now: u64, window: u64) -> usize {
        self.times
            .first_not(|hit| now.saturating_sub(hit) >= window)
    }

    #[inline(always)]
    fn is_ahead_of(&self, now: u64) -> bool {
        self.times.newest().is_some_and(|newest| newest > now)
    }

    /// Takes times later than `now` as `now`: the clock was set back. Returns whether any was.
    #[inline]
    fn bring_back_to(&mut self, now: u64) -> bool {
        let ahead = self.is_ahead_of(now);
        if ahead {
            self.times.bring_back_to(now);
        }
        ahead
    }

    #[inline(always)]
    fn forget_until(&mut self, now: u64, window: u64) {
        let gone = self.first_within(now, window);
        self.times.forget(gone);
    }

    /// Appends `cost` hits at `now` and keeps the newest `limit` of all.
    #[inline(always)]
    fn append(&mut self, now: u64, cost: u32, limit: u32) {
        let cost = cost.min(limit);
        let places = usize::try_from(limit - cost).unwrap_or(usize::MAX);
        self.times.forget(self.times.len().saturating_sub(places));
        if cost > 0 {
            self.times.push(now, cost);
        }
    }
}

/// What a log in runs begins with.
const IN_RUNS: u64 = u64::MAX;

/// A log is written in runs if that saves so many integers: the mark takes nine bytes.
const WORTH_RUNS: usize = 16;

impl Serialize for HitLog {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut previous = 0;
        let mut difference = |hit: u64| hit - std::mem::replace(&mut previous, hit);
        let in_runs = 1 + 2 * self.times.different();
        // Nor can the first be taken for the mark.
        if in_runs + WORTH_RUNS > self.times.len() && self.times.get(0) != Some(IN_RUNS) {
            let mut seq = serializer.serialize_seq(Some(self.times.len()))?;
            for hit in self.times.iter() {
                seq.serialize_element(&difference(hit))?;
            }
            return seq.end();
        }
        let mut seq = serializer.serialize_seq(Some(in_runs))?;
        seq.serialize_element(&IN_RUNS)?;
        for (hit, count) in self.times.runs() {
            seq.serialize_element(&difference(hit))?;
            seq.serialize_element(&(count as u64))?;
        }
        seq.end()
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
                let no_such = || serde::de::Error::custom("a number of hits that no log can have");
                let mut times = Times::default();
                let mut next = seq.next_element::<u64>()?;
                let in_runs = next == Some(IN_RUNS);
                if in_runs {
                    next = seq.next_element()?;
                }
                let mut hit = 0_u64;
                while let Some(difference) = next {
                    hit = hit.checked_add(difference).ok_or_else(overflow)?;
                    let count = if in_runs {
                        seq.next_element()?.filter(|count| *count > 0)
                    } else {
                        Some(1)
                    };
                    let room = LARGEST_LIMIT as usize - times.len().min(LARGEST_LIMIT as usize);
                    let count = count.filter(|count| *count as usize <= room);
                    times.push(hit, count.ok_or_else(no_such)?);
                    next = seq.next_element()?;
                }
                Ok(HitLog { times })
            }
        }

        deserializer.deserialize_seq(Differences)
    }
}
