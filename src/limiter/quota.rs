//! `Quota`: a limit per window, and its text form.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::clock::Timestamp;
use crate::error::{Error, Result};

const SECOND: u64 = 1_000;
const MINUTE: u64 = 60 * SECOND;
const HOUR: u64 = 60 * MINUTE;
const DAY: u64 = 24 * HOUR;
const WEEK: u64 = 7 * DAY;
/// The longest window: ten years of 365 days.
const LONGEST: u64 = 3_650 * DAY;

/// Every unit: its length in ms, the name that is printed, and the others that are read.
const UNITS: [(u64, &str, &[&str]); 6] = [
    (WEEK, "week", &["w", "weeks"]),
    (DAY, "day", &["d", "days"]),
    (HOUR, "hour", &["h", "hours"]),
    (MINUTE, "minute", &["min", "minutes"]),
    (SECOND, "second", &["s", "sec", "seconds"]),
    (1, "ms", &[]),
];

/// At most `limit` hits per `window`.
///
/// The text form, also used by serde, is `limit ("/" | " per ") window`. A window is a unit
/// (`5/minute`), numbers with units from the largest down (`10/1h30m`), or a number, a space and a
/// unit (`100 per 15 minutes`). Units: `ms`, `s sec second seconds`, `min minute minutes`,
/// `h hour hours`, `d day days`, `w week weeks`; a bare `m` is a minute, after a number only.
///
/// ```
/// use ratevault::Quota;
/// use std::time::Duration;
///
/// let quota: Quota = "100 per 15 minutes".parse()?;
/// assert_eq!(quota, Quota::new(100, Duration::from_secs(15 * 60))?);
/// assert_eq!(quota.to_string(), "100/15 minutes");
/// assert!("5/m".parse::<Quota>().is_err());
/// # Ok::<(), ratevault::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Quota {
    limit: u32,
    window_ms: u64,
}

impl Quota {
    /// At most `limit` hits per `window`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidQuota`] if `limit` is 0, or `window` is not whole milliseconds between 1 ms
    /// and ten years of 365 days.
    pub fn new(limit: u32, window: Duration) -> Result<Self> {
        let wrong = |wrong: Wrong| {
            let (limit, window) = (limit.to_string(), format!("{window:?}"));
            wrong.of(&format!("{limit}/{window}"), &limit, &window)
        };
        if !window.subsec_nanos().is_multiple_of(1_000_000) {
            return Err(wrong(Wrong::Window("is not whole milliseconds")));
        }
        Self::checked(limit, window.as_millis()).map_err(wrong)
    }

    /// At most `limit` hits per second.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidQuota`] if `limit` is 0; so do the others.
    pub fn per_second(limit: u32) -> Result<Self> {
        Self::new(limit, Duration::from_millis(SECOND))
    }

    /// At most `limit` hits per minute.
    ///
    /// # Errors
    ///
    /// As [`per_second`](Self::per_second).
    pub fn per_minute(limit: u32) -> Result<Self> {
        Self::new(limit, Duration::from_millis(MINUTE))
    }

    /// At most `limit` hits per hour.
    ///
    /// # Errors
    ///
    /// As [`per_second`](Self::per_second).
    pub fn per_hour(limit: u32) -> Result<Self> {
        Self::new(limit, Duration::from_millis(HOUR))
    }

    /// At most `limit` hits per day.
    ///
    /// # Errors
    ///
    /// As [`per_second`](Self::per_second).
    pub fn per_day(limit: u32) -> Result<Self> {
        Self::new(limit, Duration::from_millis(DAY))
    }

    /// How many hits the window admits.
    #[must_use]
    pub const fn limit(&self) -> u32 {
        self.limit
    }

    /// How long a hit counts.
    #[must_use]
    pub const fn window(&self) -> Duration {
        Duration::from_millis(self.window_ms)
    }

    /// The window in ms.
    #[inline]
    pub(super) const fn window_ms(&self) -> u64 {
        self.window_ms
    }

    /// When a hit made at `hit` stops counting.
    pub(super) const fn frees_at(&self, hit: u64) -> Timestamp {
        Timestamp::from_millis(hit.saturating_add(self.window_ms))
    }

    /// The quota, or what is wrong with the limit or the window.
    fn checked(limit: u32, window_ms: u128) -> Result<Self, Wrong> {
        if limit == 0 {
            return Err(Wrong::Limit("is not a limit: it must be at least 1"));
        }
        match u64::try_from(window_ms) {
            Ok(window_ms @ 1..=LONGEST) => Ok(Self { limit, window_ms }),
            Ok(0) => Err(Wrong::Window("is not a window: it must be at least 1 ms")),
            _ => Err(Wrong::Window(
                "is longer than the longest window, ten years of 365 days",
            )),
        }
    }
}

/// Which part of a quota is wrong, and why.
enum Wrong {
    Limit(&'static str),
    Window(&'static str),
}

impl Wrong {
    fn of(self, quota: &str, limit: &str, window: &str) -> Error {
        match self {
            Self::Limit(reason) => invalid(quota, limit, reason),
            Self::Window(reason) => invalid(quota, window, reason),
        }
    }
}

fn invalid(quota: impl Into<String>, part: impl Into<String>, reason: &'static str) -> Error {
    Error::InvalidQuota {
        quota: quota.into(),
        part: part.into(),
        reason,
    }
}

/// The shortest exact form: `5/minute`, `100/15 minutes`. It parses back to the same quota.
impl fmt::Display for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact = UNITS
            .iter()
            .find(|(ms, ..)| self.window_ms.is_multiple_of(*ms));
        let &(ms, name, _) = exact.unwrap_or(&(1, "ms", &[]));
        match self.window_ms / ms {
            1 => write!(f, "{}/{name}", self.limit),
            count if ms == 1 => write!(f, "{}/{count} {name}", self.limit),
            count => write!(f, "{}/{count} {name}s", self.limit),
        }
    }
}

impl FromStr for Quota {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let fail = |part: &str, reason| Err(invalid(text, part, reason));
        let Some((limit, window)) = text.split_once('/').or_else(|| text.split_once(" per "))
        else {
            return fail(text, "has no `/` or ` per ` between limit and window");
        };
        let count = match number(limit) {
            Ok(count) => count,
            Err(reason) => return fail(limit, reason),
        };
        let Ok(count) = u32::try_from(count) else {
            return fail(limit, "is larger than the largest limit, 4294967295");
        };
        let ms = match window_ms(window) {
            Ok(ms) => ms,
            Err((part, reason)) => return fail(part, reason),
        };
        Self::checked(count, ms).map_err(|wrong| wrong.of(text, limit, window))
    }
}

/// A run of decimal digits. Signs and spaces are not part of a number.
fn number(digits: &str) -> Result<u64, &'static str> {
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err("is not a whole number");
    }
    digits.parse().map_err(|_| "is too large")
}

/// The length of a unit in ms.
fn unit_ms(name: &str) -> Option<u64> {
    let known =
        |(_, printed, others): &&(u64, &str, &[&str])| *printed == name || others.contains(&name);
    UNITS.iter().find(known).map(|(ms, ..)| *ms)
}

/// The length of a unit that follows a number, where `m` is a minute.
fn counted_unit_ms(name: &str) -> Option<u64> {
    if name == "m" {
        Some(MINUTE)
    } else {
        unit_ms(name)
    }
}

/// A window in ms, or the part that is wrong and why.
fn window_ms(text: &str) -> Result<u128, (&str, &'static str)> {
    const UNKNOWN: &str =
        "is not a unit: use ms, s, min, h, d or w, or a full name (a bare `m` only after a number)";
    if let Some((count, unit)) = text.split_once(' ') {
        let count = number(count).map_err(|reason| (count, reason))?;
        let ms = counted_unit_ms(unit).ok_or((unit, UNKNOWN))?;
        return Ok(u128::from(count) * u128::from(ms));
    }
    if !text.starts_with(|first: char| first.is_ascii_digit()) {
        return unit_ms(text).map(u128::from).ok_or((text, UNKNOWN));
    }
    let (mut rest, mut total, mut previous) = (text, 0, u64::MAX);
    while !rest.is_empty() {
        let (count, after) = split_where(rest, |c| !c.is_ascii_digit());
        let (unit, after) = split_where(after, |c| c.is_ascii_digit());
        let ms =
            counted_unit_ms(unit).ok_or((if unit.is_empty() { rest } else { unit }, UNKNOWN))?;
        if ms >= previous {
            return Err((
                unit,
                "is out of order: write the largest unit first, each once",
            ));
        }
        let count = number(count).map_err(|reason| (count, reason))?;
        total += u128::from(count) * u128::from(ms);
        (rest, previous) = (after, ms);
    }
    Ok(total)
}

/// Splits `text` before its first character that `stop` names.
fn split_where(text: &str, stop: impl Fn(char) -> bool) -> (&str, &str) {
    text.split_at(text.find(stop).unwrap_or(text.len()))
}

impl Serialize for Quota {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Quota {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part_of(text: &str) -> String {
        match text.parse::<Quota>() {
            Err(Error::InvalidQuota { quota, part, .. }) => {
                assert_eq!(quota, text);
                part
            }
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn text_parses_and_prints_back() {
        for (text, limit, window_ms, printed) in [
            ("5/minute", 5, MINUTE, "5/minute"),
            ("5/s", 5, SECOND, "5/second"),
            ("100 per 15 minutes", 100, 15 * MINUTE, "100/15 minutes"),
            ("100 per hour", 100, HOUR, "100/hour"),
            ("5/week", 5, WEEK, "5/week"),
            ("5/14d", 5, 2 * WEEK, "5/2 weeks"),
            ("10/1h30m", 10, 90 * MINUTE, "10/90 minutes"),
            ("10/1hour30minutes5s", 10, 5_405 * SECOND, "10/5405 seconds"),
            ("7/15 m", 7, 15 * MINUTE, "7/15 minutes"),
            ("1/1500ms", 1, 1_500, "1/1500 ms"),
            ("4294967295/ms", u32::MAX, 1, "4294967295/ms"),
            ("1/3650d", 1, LONGEST, "1/3650 days"),
        ] {
            let quota: Quota = text.parse().expect(text);
            assert_eq!((quota.limit, quota.window_ms), (limit, window_ms), "{text}");
            assert_eq!(quota.to_string(), printed);
            assert_eq!(printed.parse::<Quota>().expect(printed), quota);
        }
    }

    #[test]
    fn an_error_names_the_bad_part() {
        for (text, part) in [
            ("5/minutes x", "minutes"),
            ("0/s", "0"),
            ("-1/s", "-1"),
            ("+1/s", "+1"),
            ("5 minute", "5 minute"),
            ("5/m", "m"),
            ("5/1m1h", "h"),
            ("5/1m1m", "m"),
            ("5/", ""),
            ("/s", ""),
            (" 5/s", " 5"),
            ("5/s ", "s"),
            ("5/ s", ""),
            ("5/Minute", "Minute"),
            ("5/1.5h", "."),
            ("5/15", "15"),
            ("5/0s", "0s"),
            ("4294967296/s", "4294967296"),
            ("99999999999999999999/s", "99999999999999999999"),
            ("5/99999999999999999999s", "99999999999999999999"),
            ("5/3651d", "3651d"),
            ("5/18446744073709551615w", "18446744073709551615w"),
        ] {
            assert_eq!(part_of(text), part, "{text}");
        }
    }

    #[test]
    fn numbers_are_checked_as_text_is() {
        assert!(Quota::per_second(0).is_err());
        assert!(Quota::new(1, Duration::ZERO).is_err());
        assert!(Quota::new(1, Duration::from_micros(1_500)).is_err());
        assert!(Quota::new(1, Duration::MAX).is_err());
        assert!(Quota::new(1, Duration::from_millis(LONGEST + 1)).is_err());
    }

    #[test]
    fn serde_uses_the_text() {
        let quota: Quota = serde_json::from_str("\"5/minute\"").expect("a quota");
        assert_eq!(serde_json::to_string(&quota).expect("json"), "\"5/minute\"");
        assert!(serde_json::from_str::<Quota>("\"5/m\"").is_err());
    }
}
