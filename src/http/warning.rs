//! What is said once, or once per interval and endpoint, however often it happens.

use std::collections::BTreeMap;
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

/// Says it once per interval for each endpoint, by the system's monotonic time.
#[derive(Debug, Default)]
pub(super) struct Throttle(Mutex<BTreeMap<String, Unsaid>>);

/// How many endpoints are told apart; those beyond share one place.
const MOST_ENDPOINTS: usize = 256;

#[derive(Debug, Default)]
struct Unsaid {
    last_said: Option<Instant>,
    count: u64,
}

impl Throttle {
    /// `None` if it was said less than `interval` ago; else how often it went unsaid since.
    pub(super) fn due(&self, endpoint: &str, interval: Duration) -> Option<u64> {
        let mut places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_known = places.contains_key(endpoint) || places.len() < MOST_ENDPOINTS;
        let name = if is_known { endpoint } else { "" };
        places.entry(name.to_owned()).or_default().due(interval)
    }
}

impl Unsaid {
    fn due(&mut self, interval: Duration) -> Option<u64> {
        let now = Instant::now();
        let since = self.last_said.map(|said| now.duration_since(said));
        if since.is_some_and(|since| since < interval) {
            self.count += 1;
            return None;
        }
        self.last_said = Some(now);
        Some(std::mem::take(&mut self.count))
    }
}
