//! Behaviour tests, in one binary so that it links once.
//!
//! Each file holds the tests of one part of the promise; `support` is what they share.

#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    clippy::print_stdout,
    clippy::panic,
    unreachable_pub,
    reason = "tests fail by panicking"
)]

mod support;

mod bound;
mod buffered;
mod clock;
mod concurrency;
mod deadlines;
#[cfg(unix)]
mod displaced;
mod dump;
mod faults;
mod flips;
mod floods;
#[cfg(target_os = "linux")]
mod full_disk;
#[cfg(feature = "axum")]
mod http_address;
#[cfg(feature = "axum")]
mod http_layer;
#[cfg(feature = "axum")]
mod http_servers;
#[cfg(unix)]
mod kills;
mod lifecycle;
mod limits;
#[cfg(all(unix, feature = "axum"))]
mod login;
#[cfg(all(target_os = "linux", feature = "axum"))]
mod nginx;
mod opening;
#[cfg(all(target_os = "linux", feature = "axum"))]
mod page;
#[cfg(target_os = "linux")]
mod permissions;
mod programs;
mod rows;
mod snapshot;
mod sweep;
mod upgrades;
mod vectors;
