//! Looking into a vault from outside: read-only, from any process, while its owner writes.
//!
//! The kind of a table is matched when it is read, so one snapshot shows tables of all kinds. It
//! knows the limiters' rows, and so lies above `limiter`; the redb side of it is in `vault`.

mod rows;

use std::path::{Path, PathBuf};
use std::time::Duration;

pub use rows::{Rows, State};

use crate::error::{Error, Result};
use crate::vault::{Reader, TableInfo};

/// A vault's file, open for reading only. It never creates, stamps or writes.
///
/// Reads follow the owner's commits: rows that are asked for later may be newer. The owner must not
/// have opened the file with [`exclusive`](crate::VaultBuilder::exclusive). A damaged file may make the
/// storage engine panic: that becomes an error here, but the process's panic hook is called.
///
/// ```
/// use ratevault::{Limiter, Quota, SlidingWindow, Snapshot, State, Vault};
///
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("limits.redb");
/// let vault = Vault::builder("rate_limits").path(&path).open()?;
/// let limiter = Limiter::new(vault, SlidingWindow::new(Quota::per_minute(5)?)?);
/// limiter.check("login", "ada")?;
///
/// let snapshot = Snapshot::open(&path)?;
/// assert_eq!(snapshot.tables()?[0].name, "rate_limits");
/// for entry in snapshot.rows("rate_limits")? {
///     let entry = entry?;
///     if let State::SlidingLog(log) = &entry.value {
///         println!("{}: {} hits", entry.key, log.times().len());
///     }
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Snapshot {
    reader: Reader,
}

/// Settings of a snapshot that is about to be opened: see [`Snapshot::builder`].
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until `open` is called"]
pub struct SnapshotBuilder {
    path: PathBuf,
    lock_timeout: Duration,
    repair: bool,
}

impl Snapshot {
    /// Opens the vault's file at `path`. Waits up to 1 s for an owner who is just opening it.
    ///
    /// # Errors
    ///
    /// Those of [`SnapshotBuilder::open`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::builder(path).open()
    }

    /// Settings for a snapshot of the vault's file at `path`.
    pub fn builder(path: impl AsRef<Path>) -> SnapshotBuilder {
        SnapshotBuilder {
            path: path.as_ref().to_owned(),
            lock_timeout: Duration::from_secs(1),
            repair: false,
        }
    }

    /// The tables of the file, in the order of their names.
    ///
    /// # Errors
    ///
    /// [`Error::Corrupt`]: the file is damaged.
    pub fn tables(&self) -> Result<Vec<TableInfo>> {
        self.reader.tables()
    }

    /// The rows of `table` in the order of their keys, those included that have expired.
    ///
    /// They are read in pages of at most 10,000, each from the latest commit, and no transaction is
    /// held in between: a reader that stops half-way does not keep the file from reusing space.
    ///
    /// # Errors
    ///
    /// - [`Error::NoSuchTable`]: the file has no such table.
    /// - [`Error::Corrupt`]: the file is damaged.
    pub fn rows(&self, table: &str) -> Result<Rows<'_>> {
        let tables = self.tables()?;
        match tables.iter().find(|known| known.name == table) {
            Some(known) => Ok(Rows::new(&self.reader, known)),
            None => Err(Error::NoSuchTable {
                path: self.reader.path(),
                table: table.to_owned(),
                tables: tables.into_iter().map(|table| table.name).collect(),
            }),
        }
    }
}

impl SnapshotBuilder {
    /// How long to wait for somebody who keeps readers out, or who is just opening the file.
    /// Default: 1 s, because opening a large file takes about that long.
    pub fn lock_timeout(mut self, timeout: Duration) -> Self {
        self.lock_timeout = timeout;
        self
    }

    /// Whether a file that was not closed cleanly, and that nobody has open, is opened for writing
    /// once, recovered and closed. Default: false, because looking should change nothing.
    pub fn repair(mut self, repair: bool) -> Self {
        self.repair = repair;
        self
    }

    /// Blocks until the file is open.
    ///
    /// # Errors
    ///
    /// - [`Error::Open`]: there is no such file, or it cannot be read.
    /// - [`Error::ReadersKeptOut`]: its owner has opened it exclusively.
    /// - [`Error::Locked`]: it was to be repaired, and somebody else has it open.
    /// - [`Error::NotClosedCleanly`]: a crash left it, and nobody has it open.
    /// - [`Error::NotAVault`], [`Error::NewerFormat`], [`Error::Corrupt`]: it holds something else,
    ///   or is damaged.
    pub fn open(self) -> Result<Snapshot> {
        let reader = Reader::open(&self.path, self.lock_timeout, self.repair)?;
        Ok(Snapshot { reader })
    }
}
