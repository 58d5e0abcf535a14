//! Time that is read often: a reading of the clock serves for some microseconds.
//!
//! Asking the system for the time is a large part of what a check in memory costs. The processor's
//! own counter is cheaper, and says whether the last reading is still good; it dates nothing. Should
//! it stop, as in a suspend, a reading serves for that much longer once.

use crate::clock::{Clock, Timestamp};

/// How long a reading serves, in ns.
const SERVES: u64 = 50_000;

/// Tells how much time has passed, cheaply.
#[derive(Debug)]
pub(super) struct Pace {
    counter: quanta::Clock,
    /// `SERVES` in the counter's ticks; 0: every reading is new.
    ticks: u64,
}

/// When the clock was read, by the counter, and what it said.
#[derive(Debug, Default)]
pub(super) struct Reading {
    at: u64,
    now: Timestamp,
}

impl Pace {
    /// `clock` is what is read.
    pub(super) fn new(clock: &dyn Clock) -> Self {
        let counter = quanta::Clock::new();
        let scale = 1 << 20;
        let ns = counter.delta_as_nanos(0, scale).max(1);
        let ticks = if clock.follows_time() {
            SERVES * scale / ns
        } else {
            0
        };
        Self { counter, ticks }
    }

    /// The time, by the last reading if that is still good.
    pub(super) fn now(&self, reading: &mut Reading, clock: &dyn Clock) -> Timestamp {
        if self.ticks == 0 {
            return clock.now();
        }
        let at = self.counter.raw();
        if at.wrapping_sub(reading.at) >= self.ticks {
            *reading = Reading {
                at,
                now: clock.now(),
            };
        }
        reading.now
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    /// A clock that counts how often it is read.
    #[derive(Debug, Default)]
    struct Counting {
        readings: AtomicU64,
        follows_time: bool,
    }

    impl Clock for Counting {
        fn now(&self) -> Timestamp {
            Timestamp::from_millis(self.readings.fetch_add(1, Ordering::Relaxed) + 1)
        }

        fn follows_time(&self) -> bool {
            self.follows_time
        }
    }

    #[test]
    fn a_clock_that_may_be_moved_is_read_each_time() {
        let clock = Counting::default();
        let (pace, mut reading) = (Pace::new(&clock), Reading::default());
        for expected in 1..100 {
            assert_eq!(pace.now(&mut reading, &clock).as_millis(), expected);
        }
    }

    #[test]
    fn a_reading_of_a_clock_that_follows_time_serves_for_a_while_and_no_longer() {
        let clock = Counting {
            follows_time: true,
            ..Counting::default()
        };
        let (pace, mut reading) = (Pace::new(&clock), Reading::default());
        let mut calls = 0_u64;
        // It ends because no reading serves for ever.
        while pace.now(&mut reading, &clock).as_millis() < 100 {
            calls += 1;
        }
        assert!(calls > 200, "{calls} calls took 100 readings");
    }
}
