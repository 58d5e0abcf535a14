//! An embedded, persistent rate limiter: limits that survive restarts and crashes, with no server
//! beside the app.
//!
//! A [`Vault`] is a named table with a time to live per row, kept in one file. A [`Limiter`] keeps
//! there, for each (endpoint, client) pair, what its algorithm needs to decide. It is for the author
//! of one service, tool or bot who protects a login, a password reset or a paid API, and who does
//! not want an attacker to start afresh with every deploy.
//!
//! ```no_run
//! use ratevault::{Limiter, Quota, SlidingWindow, Vault};
//!
//! let vault = Vault::new("rate_limits")?; // at startup: $RATEVAULT_DB, else ./ratevault.redb
//! let limiter = Limiter::new(vault, SlidingWindow::new(Quota::per_minute(5)?)?);
//!
//! let decision = limiter.check("login", "203.0.113.7")?;
//! match decision.retry_after() {
//!     None => println!("served; {} left", decision.remaining()),
//!     Some(seconds) => println!("429; retry after {seconds} s"),
//! }
//! # Ok::<(), ratevault::Error>(())
//! ```
//!
//! In async code use [`Limiter::check_async`]: it never blocks the runtime, and needs none in
//! particular. HTTP services are guarded by a tower layer: see the module `http`, behind the feature
//! of that name, which is on by default; so is `axum`, which reads axum's peer addresses and routes.
//!
//! It is not: a cache, a general key-value server, a cluster, a shaper that queues requests.
//!
//! # What survives which crash
//!
//! By default a check returns after its transaction is on disk ([`Durability::Committed`]). With
//! [`Durability::Buffered`] it is decided in memory, at the speed of a limiter that forgets, and one
//! transaction per interval carries what changed to the disk.
//!
//! | what happens | committed: what is lost | buffered: what is lost |
//! |---|---|---|
//! | the vault is closed, or its last handle dropped | nothing | nothing |
//! | the process panics or is killed (`kill -9`) | nothing that was answered | what no completed flush carried: the last interval, and the time a flush takes |
//! | the machine loses power | nothing that was answered, if the disk keeps what it has synced | the same as when it is killed |
//! | the disk fails | nothing: calls fail at once with [`Error::Unavailable`] until it is well; then service resumes without a restart | nothing, unless the process ends before the disk is well: decisions about clients that are in memory go on, others fail |
//!
//! Choose `Committed` for logins, password resets and paid calls: an attacker who can crash a service
//! should not win attempts by it. Choose `Buffered` where every request is checked, and a crash may
//! forgive the last moment.
//!
//! An operation that ends with [`Error::Unavailable`] says whether it may have been applied.
//!
//! # What a table may forget
//!
//! Clients choose the keys, so a table is bounded: [`VaultBuilder::max_keys`], 1,000,000 rows by
//! default. When it is full, a newcomer displaces an expired row, else the row whose last write is
//! oldest: a key that is being counted can be forgotten inside its own window, for one newcomer
//! each. [`Stats::evicted`] counts them.
//!
//! # Time
//!
//! Hits and deadlines are whole milliseconds of a [`Clock`]. [`SystemClock`] reads the wall clock
//! once per process and then follows a clock that nobody sets. After a restart the wall clock may
//! lie behind the stored times: they are taken as now, so that a client is refused for one window
//! at most. A clock that jumps ahead across a restart cannot be told from time that passed.
//!
//! # One file, one writing process
//!
//! All vaults on one file in one process share it. A second process that opens it gets
//! [`Error::Locked`] after a timeout, never a second count. Other processes may read while this one
//! writes, unless it was opened with [`VaultBuilder::exclusive`]. The file is created with mode 0600;
//! keys hold what the caller passes as client, such as addresses and account names.
//!
//! The path has to lead to the file for as long as it is open. When the file is deleted, moved away or
//! replaced by another one (a backup that is restored, a link that a deploy points elsewhere), calls
//! that need the disk fail with [`Error::Unavailable`], and nothing is answered that only the lost file
//! would remember. Nothing is made in its place: once the file is back, service resumes; to go on with
//! what is at the path now, close the vault and open it again. This is looked at with every commit and
//! every flush, on Unix alone. A process that changes its root directory does so before it opens a vault.
//!
//! [`Snapshot`] looks into a file from outside, while its owner writes.
//!
//! # Platforms
//!
//! Linux is tested. macOS and Windows are meant to work. Elsewhere there are no byte-range locks:
//! use [`VaultBuilder::exclusive`].

mod clock;
mod error;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
#[cfg(feature = "http")]
pub mod http;
mod limiter;
mod snapshot;
mod vault;

pub use clock::{Clock, ClockWaiter, ManualClock, SystemClock, Timestamp};
pub use error::{Applied, Cause, Error, Result};
pub use limiter::{
    Admission, Algorithm, AsyncGateFn, Decision, FixedWindow, Gate, GateFn, HitLog, IntoAdmission,
    Limiter, Quota, Refusals, SlidingWindow, Verdict, WindowCount, async_gate_fn, gate_fn,
};
pub use snapshot::{Rows, Snapshot, SnapshotBuilder, State};
pub use vault::{
    Client, Durability, Entry, Key, MemoryStorage, Pending, Row, Scan, Slot, Stats, Storage,
    TableInfo, Vault, VaultBuilder, default_path,
};

/// The code of the README compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
