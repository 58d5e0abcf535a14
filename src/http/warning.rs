//! What is said once, or once per interval, however often it happens.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Says it once.
#[derive(Debug, Default)]
pub(super) struct Once(AtomicBool);

impl Once {
    pub(super) const fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// Whether this is the first time.
    pub(super) fn first(&self) -> bool {
        !self.0.load(Ordering::Relaxed) && !self.0.swap(true, Ordering::Relaxed)
    }
}

/// Says it once per interval, of the system's monotonic time.
#[derive(Debug, Default)]
pub(super) struct Throttle(Mutex<Unsaid>);

#[derive(Debug, Default)]
struct Unsaid {
    last_said: Option<Instant>,
    count: u64,
}

impl Throttle {
    /// `None` if it was said less than `interval` ago; else how often it went unsaid since.
    pub(super) fn due(&self, interval: Duration) -> Option<u64> {
        let mut unsaid = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let said = unsaid.last_said.map(|said| now.duration_since(said));
        if said.is_some_and(|since| since < interval) {
            unsaid.count += 1;
            return None;
        }
        unsaid.last_said = Some(now);
        Some(std::mem::take(&mut unsaid.count))
    }
}
