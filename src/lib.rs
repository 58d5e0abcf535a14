//! An embedded, persistent rate limiter.
#![doc = ""]

mod clock;
mod error;
mod limiter;
mod vault;

pub use clock::{Clock, ClockWaiter, ManualClock, SystemClock, Timestamp};
pub use error::{Cause, Error, Outcome, Result};
pub use limiter::{
    Algorithm, Decision, FixedWindow, HitLog, Limiter, Quota, Refusals, SlidingWindow, Verdict,
    WindowCount,
};
pub use vault::{
    Client, Entry, Key, MemoryStorage, Pending, Row, Scan, Slot, Stats, Storage, Vault,
    VaultBuilder,
};
