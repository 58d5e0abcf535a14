//! What the tests share: a plain row type, waiting without sleeping, and a storage that misbehaves.

#[cfg(all(unix, feature = "axum"))]
pub mod client;
pub mod desk;
pub mod faulty;
pub mod file;
#[cfg(feature = "axum")]
pub mod http;
#[cfg(target_os = "linux")]
pub mod mount;
pub mod power_cut;
#[cfg(all(unix, feature = "axum"))]
pub mod server;
#[cfg(feature = "axum")]
pub mod web;

use std::sync::Arc;
use std::time::{Duration, Instant};

use ratevault::{Key, ManualClock, Row, Timestamp};
use serde::{Deserialize, Serialize};

/// A row that is just a number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Number(pub u64);

impl Row for Number {
    const KIND: &'static str = "number/1";
}

pub fn key(client: &str) -> Key {
    Key::new("test", client).unwrap()
}

/// An instant that is far from either end of time.
pub const START: u64 = 1_800_000_000_000;

pub fn manual_clock() -> Arc<ManualClock> {
    Arc::new(ManualClock::new(Timestamp::from_millis(START)))
}

pub const SECOND: Duration = Duration::from_secs(1);
pub const MINUTE: Duration = Duration::from_secs(60);
pub const DAY: Duration = Duration::from_secs(86_400);

/// A runtime that a blocking call would stop altogether.
pub fn single_threaded() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap()
}

/// Returns once `holds` does, which another thread brings about; fails if it never comes.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < Duration::from_secs(60), "never: {what}");
        std::thread::yield_now();
    }
}
