//! A clock that follows time and is set back and forth.

use std::sync::{Mutex, PoisonError, Weak};

use ratevault::{Clock, ClockWaiter, SystemClock, Timestamp};

#[derive(Debug)]
pub(crate) struct SteppedClock(Mutex<State>);

#[derive(Debug)]
struct State {
    /// How many ms it is ahead of the system's clock.
    offset: i64,
    /// The latest instant it has shown since it was set.
    peak: u64,
    waiters: Vec<Waiter>,
}

struct Waiter(Weak<dyn ClockWaiter>);

impl std::fmt::Debug for Waiter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Waiter")
    }
}

impl State {
    fn read(&mut self) -> u64 {
        let now = SystemClock.now().as_millis();
        self.peak = self.peak.max(now.saturating_add_signed(self.offset));
        self.peak
    }
}

impl SteppedClock {
    pub(crate) fn new(offset: i64) -> Self {
        Self(Mutex::new(State {
            offset,
            peak: 0,
            waiters: Vec::new(),
        }))
    }

    /// Sets it. Says the latest instant that it has shown before, and what it shows.
    pub(crate) fn step(&self, offset: i64) -> (u64, u64) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let peak = state.peak;
        (state.offset, state.peak) = (offset, 0);
        let now = state.read();
        let waiters = state.waiters.iter().filter_map(|waiter| waiter.0.upgrade());
        let waiters: Vec<_> = waiters.collect();
        drop(state);
        waiters.iter().for_each(|waiter| waiter.clock_moved());
        (peak, now)
    }
}

impl Clock for SteppedClock {
    fn now(&self) -> Timestamp {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Timestamp::from_millis(state.read())
    }

    fn wake_on_change(&self, waiter: Weak<dyn ClockWaiter>) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.waiters.retain(|known| known.0.strong_count() > 0);
        state.waiters.push(Waiter(waiter));
    }
}
