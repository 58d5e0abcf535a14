//! `VaultBuilder`: where the file is, and how it and the table behave.

use std::marker::PhantomData;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::Vault;
use super::durability::Durability;
use super::file::{OpenFile, TableHandle};
use super::open::Source;
use super::overlay::{Buffer, Overlay};
use super::registry;
use super::row::Row;
use super::settings::{Wanted, WantedOfTable};
use super::stamp::Expected;
use super::storage::{MemoryStorage, Storage};
use super::writer;
use crate::clock::Clock;
use crate::error::{Error, Result};

/// Names the file of a vault that is given no path.
const PATH_VARIABLE: &str = "RATEVAULT_DB";
const SHORTEST_FLUSH: Duration = Duration::from_millis(1);
const DEFAULT_PATH: &str = "ratevault.redb";

/// Settings of a vault that is about to be opened: see [`Vault::builder`].
///
/// Settings of the file hold for all vaults on it in this process. What a second builder leaves
/// unset takes what the file has; what it sets differently is an error.
///
/// ```
/// use ratevault::{HitLog, Vault};
/// use std::time::Duration;
///
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("limits.redb");
/// let vault: Vault<HitLog> = Vault::builder("rate_limits")
///     .path(&path)
///     .max_keys(100_000)
///     .lock_timeout(Duration::from_secs(1))
///     .open()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[must_use = "a builder does nothing until `open` is called"]
pub struct VaultBuilder<V> {
    table: String,
    place: Place,
    wanted: Wanted,
    wanted_of_table: WantedOfTable,
    answer_timeout: Option<Duration>,
    value: PhantomData<fn() -> V>,
}

#[derive(Debug)]
enum Place {
    Default,
    Path(PathBuf),
    Storage(Arc<dyn Storage>),
}

impl<V: Row> VaultBuilder<V> {
    pub(super) fn new(table: &str) -> Self {
        Self {
            table: table.to_owned(),
            place: Place::Default,
            wanted: Wanted::default(),
            wanted_of_table: WantedOfTable::default(),
            answer_timeout: None,
            value: PhantomData,
        }
    }

    /// The file. Default: `$RATEVAULT_DB`, else `./ratevault.redb`, because the operator should be
    /// able to move it without a new build.
    pub fn path(mut self, path: impl Into<PathBuf>) -> Self {
        self.place = Place::Path(path.into());
        self
    }

    /// No file: a memory of its own, gone with the last handle. Default: a file.
    pub fn in_memory(self) -> Self {
        self.storage(Arc::new(MemoryStorage::default()))
    }

    /// No file: a storage that only this process can reach. Vaults on the same `Arc` share it.
    /// Default: a file.
    pub fn storage<S: Storage>(mut self, storage: Arc<S>) -> Self {
        self.place = Place::Storage(storage);
        self
    }

    /// Keeps all other processes out, readers too, and saves a sync per commit. A setting of the
    /// file. Default: others may read while this process writes, because operators want to look.
    pub fn exclusive(mut self) -> Self {
        self.wanted.exclusive = Some(true);
        self
    }

    /// How many bytes of the file are cached in memory. A setting of the file. Default: 16 MiB,
    /// because a limiter is a small part of its process.
    pub fn cache_bytes(mut self, bytes: usize) -> Self {
        self.wanted.cache_bytes = Some(bytes);
        self
    }

    /// How long to wait for another process to release the file. A setting of the file. Default:
    /// 5 s, so that a restarting service may overlap the old one.
    pub fn lock_timeout(mut self, timeout: Duration) -> Self {
        self.wanted.lock_timeout = Some(timeout);
        self
    }

    /// What dates hits and deadlines. A setting of the file; two builders agree if they hold the
    /// same `Arc`. Default: [`SystemClock`](crate::SystemClock), because it cannot be set back
    /// while the process runs.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.wanted.clock = Some(clock);
        self
    }

    /// Whether expired rows leave the file on their own. A setting of the file. Default: true,
    /// because clients that never come back would otherwise stay; with `false`, call
    /// [`Vault::sweep`]. Only tables that this process has opened are swept.
    pub fn background_sweep(mut self, enabled: bool) -> Self {
        self.wanted.background_sweep = Some(enabled);
        self
    }

    /// How many rows the table may hold, at least 1. A setting of the table. Default: 1,000,000,
    /// because clients choose the keys and an unbounded table is a disk that they can fill.
    ///
    /// A newcomer to a full table is never refused; the row whose last write is oldest goes, an
    /// expired one first. A limit of `n` hits costs a table on disk up to about `max_keys` times
    /// the key, 30 bytes, and 3 bytes per hit.
    pub fn max_keys(mut self, max_keys: u64) -> Self {
        self.wanted_of_table.max_keys = Some(max_keys);
        self
    }

    /// When what a call answers is on disk. A setting of the table, until the file is closed.
    /// Default: [`Durability::Committed`], because a limit that forgets is the reason to be here.
    ///
    /// ```
    /// use ratevault::{Durability, HitLog, Vault};
    /// use std::time::Duration;
    ///
    /// let flush_every = Duration::from_millis(100);
    /// let vault: Vault<HitLog> = Vault::builder("rate_limits")
    ///     .in_memory()
    ///     .durability(Durability::Buffered { flush_every })
    ///     .open()?;
    /// # Ok::<(), ratevault::Error>(())
    /// ```
    pub fn durability(mut self, durability: Durability) -> Self {
        self.wanted_of_table.durability = Some(durability);
        self
    }

    /// How many bytes of memory the rows of a buffered table may take. A setting of the table.
    /// Default: 256 MiB, about a million clients of a small limit.
    ///
    /// Rows that the file has too, and what is known of those that have left it, make room for others once
    /// that is needed: after many clients it is in use to the full. When all are newer than the file's, a call
    /// waits for the flush, which begins at once.
    pub fn buffer_bytes(mut self, bytes: usize) -> Self {
        self.wanted_of_table.buffer_bytes = Some(bytes);
        self
    }

    /// How long one call of this handle waits for its answer. Default: for as long as it takes,
    /// because an operation that was given up may still be applied.
    ///
    /// It waits so for the writer. A row that a blocking call itself reads from the file, as
    /// [`get`](Vault::get) does, and of a buffered vault a check of a client that is not in memory, takes as
    /// long as the disk does.
    pub fn answer_timeout(mut self, timeout: Duration) -> Self {
        self.answer_timeout = Some(timeout);
        self
    }

    /// Blocks until the file is open and checked and the table is there.
    ///
    /// A file that is not there is created, with mode 0600; its directory is not. A file that is
    /// there and empty is initialised in place and keeps its mode; a crash in that moment leaves it
    /// unusable. The whole file is verified: measured 0.04 to 0.16 s per million rows. The answer
    /// timeout does not cover this.
    ///
    /// # Errors
    ///
    /// - [`Error::InvalidSetting`], [`Error::Conflict`]: a setting is wrong, or another one holds.
    /// - [`Error::NoDirectory`], [`Error::Open`]: the file cannot be reached.
    /// - [`Error::Locked`], [`Error::CannotLock`]: it cannot be locked.
    /// - [`Error::NotAVault`], [`Error::NewerFormat`], [`Error::WrongKind`], [`Error::Corrupt`]: it
    ///   holds something else, or is damaged.
    /// - [`Error::Unavailable`]: its storage fails.
    /// - [`Error::InsideUpdate`]: called from an `update` closure.
    pub fn open(self) -> Result<Vault<V>> {
        self.check()?;
        // A closure may run on the thread that the file waits for to be closed.
        writer::refuse_current_thread()?;
        let source = match self.place {
            Place::Default => Source::file(&default_path())?,
            Place::Path(path) => Source::file(&path)?,
            Place::Storage(storage) => Source::Private(storage),
        };
        let expected = Expected {
            table: &self.table,
            kind: V::KIND,
            is_there: false,
        };
        loop {
            let file = registry::open(source.clone(), &self.wanted, expected)?;
            let buffer = |place, flush_every, bytes| -> Arc<dyn Buffer> {
                Arc::new(Overlay::<V>::new(place, flush_every, bytes))
            };
            match file.table(&self.table, V::KIND, &self.wanted_of_table, buffer) {
                // Another handle closed the file just now: it can be opened again.
                Err(Error::Closed { .. }) => {}
                handle => {
                    let handle = handle?;
                    return Ok(Vault {
                        overlay: overlay_of(&handle, &file)?,
                        handle,
                        file,
                        answer_timeout: self.answer_timeout,
                    });
                }
            }
        }
    }

    fn check(&self) -> Result<()> {
        let invalid = |setting, value: &str, reason| {
            Err(Error::InvalidSetting {
                setting,
                value: value.to_owned(),
                reason,
            })
        };
        if !(1..=128).contains(&self.table.len()) || self.table.contains(char::is_control) {
            let value = format!("{:?}", self.table);
            let reason = "a name has 1 to 128 bytes and no control characters";
            return invalid("table", &value, reason);
        }
        if self.wanted_of_table.max_keys == Some(0) {
            return invalid("max_keys", "0", "a table has to hold at least one row");
        }
        if let Some(Durability::Buffered { flush_every }) = self.wanted_of_table.durability
            && flush_every < SHORTEST_FLUSH
        {
            let reason = "a flush takes about a millisecond at least";
            return invalid("flush_every", &format!("{flush_every:?}"), reason);
        }
        Ok(())
    }
}

/// The rows in memory, if the table is buffered.
fn overlay_of<V: Row>(handle: &TableHandle, file: &OpenFile) -> Result<Option<Arc<Overlay<V>>>> {
    let Some(buffer) = &handle.table.buffer else {
        return Ok(None);
    };
    let overlay = Arc::clone(buffer).as_any().downcast();
    overlay.map(Some).map_err(|_| Error::Conflict {
        path: file.shared().path.to_path_buf(),
        setting: "the type of its buffered rows",
        open: format!("another type of kind {:?}", V::KIND),
        requested: std::any::type_name::<V>().to_owned(),
    })
}

/// The file of a vault that is given no path: `$RATEVAULT_DB`, else `ratevault.redb`.
#[must_use]
pub fn default_path() -> PathBuf {
    std::env::var_os(PATH_VARIABLE)
        .filter(|path| !path.is_empty())
        .map_or_else(|| PathBuf::from(DEFAULT_PATH), PathBuf::from)
}
