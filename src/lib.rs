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
//! | the process panics or is killed (`kill -9`) | nothing that was answered | what no completed flush carried: the last interval and the time a flush takes, more if that is long: [`flush_every`](Durability::Buffered::flush_every) |
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
//! # Who may try what
//!
//! The limits are there for people who would rather not be limited. What they can do, and what not:
//!
//! - **Whoever is counted chooses the key**, as far as you let him. Anybody can write any number of
//!   texts into a form or a header: count a name that exists, or count the address too. An address
//!   costs something, a /64 of IPv6 is counted as one. Keys are told apart byte by byte, so bring names
//!   into one form first. No key of any length or content shares the count of another, nor slows others
//!   down: it is hashed with a secret of the process, and a long one is stored as its SHA-256.
//! - **A flood of new keys** meets the bound and costs no more disk than
//!   [`max_keys`](VaultBuilder::max_keys) rows and no more memory than
//!   [`buffer_bytes`](VaultBuilder::buffer_bytes). It forgets whoever has been silent for longest: a client
//!   at its limit that stays silent is let back in early after about `max_keys` newcomers. One that
//!   keeps trying is not, if refused checks are counted ([`Refusals::Count`], the default).
//!   [`Stats::evicted`] shows it.
//! - **Proxies**: `X-Forwarded-For` is text that a client can write. The module `http` believes it only as far
//!   as it was written by the proxies that you name; without any it is ignored.
//! - **The clock**: whoever sets the system's time changes nothing while the process runs. Ahead before
//!   a start: windows have passed. Back before a start: clients are refused for a window at most.
//! - **A disk that fails or is full**: calls fail, they do not admit. An HTTP service answers 503 then;
//!   `fail_open` serves instead, uncounted, so whoever can fill the disk has unlimited attempts at what
//!   it guards: keep it for what is not secret.
//! - **A crash** wins what the table above says. Whoever can crash the service at will, and guesses
//!   passwords, is a reason for `Committed`.
//! - **What is stored about a person**: the endpoint's name, the key that you pass (an address, an account's
//!   name; a text of more than 256 bytes as its SHA-256, which hides nothing that can be guessed) and
//!   the times of the hits, in the clear. It leaves the file by itself a second after the longest window
//!   has passed since the last hit, in a table that is open; `reset` removes it at once. The file's free
//!   pages, and backups, may hold it for longer.
//! - **The file** is readable and writable by its owner alone (mode 0600). Whoever may write to it, or to its
//!   directory, can forget every limit. It is no defence against the account that the service runs as, or
//!   root. Bytes that were changed by accident are seen by checksums; by intent they need not be.
//! - **A reader that stops** in the middle of a page, killed or not, blocks nobody. As long as it is
//!   stopped, and not killed, the pages that it may still read are not used again, and the file grows
//!   with every commit. [`Snapshot`] holds a page of rows at a time, however slow its user is.
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
