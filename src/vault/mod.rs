//! Named tables with a time to live per row, kept in one redb file.
//!
//! A call goes from the handle ([`Vault`]) through the queue to the writer, which applies it in a
//! write transaction and answers after the commit; reads go to the latest commit directly.
//!
//! ```text
//! Vault ── operation ──> queue ──> writer ──> batch ──> table: rows + deadlines ──> redb
//!   └── read transactions ───────────────────────────────────────────────────────> redb
//! ```
//!
//! | rooms | what lives there |
//! |---|---|
//! | `builder`, `settings`, `registry`, `open`, `create`, `rehearsal` | how a file comes to be open, once per process |
//! | `file`, `queue`, `writer`, `batch`, `operation`, `slot`, `answer`, `timer` | how a call becomes part of a transaction, and comes back |
//! | `table`, `deadline`, `sweep`, `bound` | what a transaction does to rows, and which of them go |
//! | `key`, `row`, `codec`, `stamp` | the format of the file, documented where it is encoded |
//! | `scan`, `reader` | reading many rows, from inside and from outside |
//! | `storage` | where the bytes are |

mod answer;
mod batch;
mod bound;
mod builder;
mod codec;
mod create;
mod deadline;
mod file;
mod key;
mod open;
mod operation;
mod queue;
mod reader;
mod registry;
mod rehearsal;
mod row;
mod scan;
mod settings;
mod slot;
mod stamp;
mod storage;
mod sweep;
mod table;
mod timer;
mod writer;

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use redb::{ReadTransaction, ReadableTableMetadata};

pub use answer::Pending;
pub use builder::{VaultBuilder, default_path};
pub use key::{Client, Key};
pub use reader::TableInfo;
pub use row::Row;
pub use scan::{Entry, Scan};
pub use slot::Slot;
pub use storage::{MemoryStorage, Storage};

pub(crate) use codec::decode as decode_value;
pub(crate) use key::corrupt_row;
pub(crate) use reader::Reader;
pub(crate) use scan::Page;
pub(crate) use table::Stored;
#[cfg(feature = "http")]
pub(crate) use timer::Alarm;

use crate::clock::Timestamp;
use crate::error::Result;
use answer::Answer;
use file::{OpenFile, TableHandle};
use slot::IfDamaged;
use table::{Table, rows_name};

/// A named table of `V` with a time to live per row, in a file.
///
/// Cheap to clone. All vaults on one file in one process share it; another process that wants to
/// write gets [`Error::Locked`](crate::Error::Locked). A call that changes something returns after
/// the change is on disk. Dropping the last handle of a file closes it, and blocks until the disk
/// has everything; a handle in a `static` is never dropped, so call [`close`](Self::close).
///
/// ```
/// use ratevault::{Key, Vault, WindowCount};
///
/// let vault: Vault<WindowCount> = Vault::builder("counts").in_memory().open()?;
/// let key = Key::new("login", "203.0.113.7")?;
/// assert_eq!(vault.get(&key)?, None);
/// # Ok::<(), ratevault::Error>(())
/// ```
#[derive(Debug)]
pub struct Vault<V> {
    file: Arc<OpenFile>,
    handle: TableHandle,
    answer_timeout: Option<Duration>,
    value: PhantomData<fn() -> V>,
}

impl<V> Clone for Vault<V> {
    fn clone(&self) -> Self {
        Self {
            file: Arc::clone(&self.file),
            handle: self.handle.clone(),
            answer_timeout: self.answer_timeout,
            value: PhantomData,
        }
    }
}

/// Counters of one table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Rows in the file, those included that have expired and wait for the sweep.
    pub rows: u64,
    /// The most rows the table may hold.
    pub max_keys: u64,
    /// Live rows that the bound forgot since the file was opened.
    pub evicted: u64,
    /// Expired rows that left since the file was opened.
    pub swept: u64,
}

impl<V: Row> Vault<V> {
    /// Blocks until `table` is open in the default file: `$RATEVAULT_DB`, else `./ratevault.redb`.
    ///
    /// # Errors
    ///
    /// Those of [`VaultBuilder::open`].
    pub fn new(table: &str) -> Result<Self> {
        Self::builder(table).open()
    }

    /// Settings for a vault on `table`, a name of 1 to 128 bytes.
    pub fn builder(table: &str) -> VaultBuilder<V> {
        VaultBuilder::new(table)
    }

    /// The value of `key`, if it has not expired. Waits for nobody.
    ///
    /// # Errors
    ///
    /// - [`Error::CorruptRow`](crate::Error::CorruptRow): this row is damaged.
    /// - [`Error::Unavailable`](crate::Error::Unavailable): the storage fails.
    /// - [`Error::Closed`](crate::Error::Closed): the vault was closed.
    pub fn get(&self, key: &Key) -> Result<Option<V>> {
        self.look(key).map(|(value, _)| value)
    }

    /// As [`get`](Self::get), with the instant at which it was looked.
    pub(crate) fn look(&self, key: &Key) -> Result<(Option<V>, Timestamp)> {
        let table = &self.table().name;
        let read = |txn: &ReadTransaction| {
            let rows = txn.open_table(table::rows(&rows_name(table)))?;
            let row = rows.get(key.as_bytes())?;
            let row = row.as_ref().map(|row| row.value());
            Ok(Stored::read(key.as_bytes(), row))
        };
        let stored = self.file.shared().read(read)?;
        let now = self.file.shared().settings.clock.now();
        let mut slot = Slot::fill(self.table(), key, &stored, now, IfDamaged::Refuse)?;
        Ok((slot.take(), now))
    }

    /// Blocks until `value` is stored under `key`, to live for `ttl`.
    ///
    /// # Errors
    ///
    /// Those of [`update`](Self::update), except that a damaged row is replaced.
    pub fn put(&self, key: &Key, value: V, ttl: Duration) -> Result<()> {
        let put = move |slot: &mut Slot<V>| slot.put(value, ttl);
        self.submit(key, IfDamaged::Replace, put)?.wait()
    }

    /// Blocks until the row of `key` is gone from the disk, also if it was damaged. Says whether
    /// there was one that had not expired.
    ///
    /// # Errors
    ///
    /// Those of [`update`](Self::update), except that a damaged row is removed.
    pub fn remove(&self, key: &Key) -> Result<bool> {
        let remove = |slot: &mut Slot<V>| {
            slot.remove();
            slot.found()
        };
        self.submit(key, IfDamaged::Replace, remove)?.wait()
    }

    /// Blocks until every row of `endpoint` is gone from the disk, and says how many there were.
    ///
    /// At most 1,000 rows go in one transaction, so that others are served meanwhile. A row that is
    /// written meanwhile may stay.
    ///
    /// # Errors
    ///
    /// Those of [`update`](Self::update), except that damaged rows are removed too, and
    /// [`Error::EndpointTooLong`](crate::Error::EndpointTooLong).
    pub fn remove_endpoint(&self, endpoint: &str) -> Result<u64> {
        let prefix = Key::prefix(endpoint)?;
        let (mut removed, mut after) = (0, None);
        loop {
            let table = Arc::clone(self.table());
            let step = operation::remove_prefix(table, prefix.clone(), after);
            let shared = self.file.shared();
            let (count, last) = shared.submit(self.answer_timeout, true, step)?.wait()?;
            removed += count;
            // Never back to what was passed: a busy endpoint would never be done with.
            match last {
                Some(last) => after = Some(last),
                None => return Ok(removed),
            }
        }
    }

    /// Blocks until `f` has read and changed the row of `key` and the disk has it.
    ///
    /// This is the one read-modify-write: `f` runs inside the write transaction, alone, on the
    /// writer's thread, so it must be short and must not use a vault. What it leaves in the slot
    /// is written after it returned. A panic in `f` goes on in this call and changes nothing.
    ///
    /// # Errors
    ///
    /// - [`Error::CorruptRow`](crate::Error::CorruptRow): this row is damaged; `f` is not called.
    /// - [`Error::Encode`](crate::Error::Encode): the value left cannot be stored.
    /// - [`Error::Unavailable`](crate::Error::Unavailable): the storage fails, or did not answer
    ///   within the answer timeout.
    /// - [`Error::Overloaded`](crate::Error::Overloaded): 16,384 operations are already waiting.
    /// - [`Error::Closed`](crate::Error::Closed): the vault was closed.
    /// - [`Error::InsideUpdate`](crate::Error::InsideUpdate): called from such a closure.
    ///
    /// # Panics
    ///
    /// Only if `f` does.
    ///
    /// ```
    /// use ratevault::{Key, Row, Vault};
    /// use serde::{Deserialize, Serialize};
    /// use std::time::Duration;
    ///
    /// #[derive(Default, Serialize, Deserialize)]
    /// struct Failures(u32);
    ///
    /// impl Row for Failures {
    ///     const KIND: &'static str = "failures/1";
    /// }
    ///
    /// let vault: Vault<Failures> = Vault::builder("failures").in_memory().open()?;
    /// let failures = vault.update(&Key::new("login", "ada")?, |slot| {
    ///     let count = slot.take().unwrap_or_default().0 + 1;
    ///     slot.put(Failures(count), Duration::from_secs(900));
    ///     count
    /// })?;
    /// assert_eq!(failures, 1);
    /// # Ok::<(), ratevault::Error>(())
    /// ```
    pub fn update<R, F>(&self, key: &Key, f: F) -> Result<R>
    where
        F: FnOnce(&mut Slot<V>) -> R + Send + 'static,
        R: Send + 'static,
    {
        self.submit(key, IfDamaged::Refuse, f)?.wait()
    }

    /// As [`update`](Self::update), without blocking; on any executor.
    ///
    /// The operation counts from this call on: dropping the future does not take it back.
    ///
    /// # Errors
    ///
    /// Those of [`update`](Self::update).
    ///
    /// # Panics
    ///
    /// Awaiting it does, only if `f` does.
    pub fn update_async<R, F>(&self, key: &Key, f: F) -> Pending<R>
    where
        F: FnOnce(&mut Slot<V>) -> R + Send + 'static,
        R: Send + 'static,
    {
        self.submit(key, IfDamaged::Refuse, f).into()
    }

    /// The instant `at` of the vault's clock, by the wall clock.
    pub(crate) fn wall(&self, at: Timestamp) -> Timestamp {
        let clock = &self.file.shared().settings.clock;
        let now = clock.now();
        at.moved(now, clock.wall())
    }

    const fn table(&self) -> &Arc<Table> {
        &self.handle.table
    }

    fn submit<R, F>(&self, key: &Key, if_damaged: IfDamaged, f: F) -> Result<Answer<R>>
    where
        F: FnOnce(&mut Slot<V>) -> R + Send + 'static,
        R: Send + 'static,
    {
        let alone = move |[slot]: &mut [Slot<V>; 1]| f(slot);
        let table = Arc::clone(self.table());
        let step = operation::update(table, [key.clone()], if_damaged, alone);
        self.file.shared().submit(self.answer_timeout, false, step)
    }

    /// The rows that have not expired, in the order of their keys. Waits for nobody.
    ///
    /// Rows are read in pages of 1,000, each from the latest commit; a row that changes meanwhile
    /// may be seen before or after its change. A damaged row is an error and the scan goes on.
    pub fn scan(&self) -> Scan<V> {
        Scan::new(Arc::clone(&self.file), Arc::clone(self.table()))
    }

    /// How many rows the table has on disk, those included that have expired and wait for the
    /// sweep. Never more than `max_keys`, once a bound that was lowered is reached. Costs the same
    /// however many there are.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`](crate::Error::Unavailable), [`Error::Closed`](crate::Error::Closed).
    pub fn len(&self) -> Result<u64> {
        let table = &self.table().name;
        self.file.shared().read(|txn| {
            let rows = txn.open_table(table::rows(&rows_name(table)))?;
            Ok(rows.len()?)
        })
    }

    /// Whether the table has no rows on disk.
    ///
    /// # Errors
    ///
    /// As [`len`](Self::len).
    pub fn is_empty(&self) -> Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Counters of the table.
    ///
    /// # Errors
    ///
    /// As [`len`](Self::len).
    pub fn stats(&self) -> Result<Stats> {
        Ok(Stats {
            rows: self.len()?,
            max_keys: self.table().max_keys,
            evicted: self.table().evicted.load(Ordering::Relaxed),
            swept: self.table().swept.load(Ordering::Relaxed),
        })
    }

    /// Blocks until every row that has expired is gone from the disk, and says how many went.
    ///
    /// The background sweep does this on its own, about a second after rows expire.
    ///
    /// # Errors
    ///
    /// Those of [`update`](Self::update).
    pub fn sweep(&self) -> Result<u64> {
        let mut removed = 0;
        loop {
            let step = operation::sweep(Arc::clone(self.table()));
            let answer = self.file.shared().submit(self.answer_timeout, true, step)?;
            let (count, more) = answer.wait()?;
            removed += count;
            if !more {
                return Ok(removed);
            }
        }
    }

    /// Blocks until everything that was queued before, by any handle of the file, is on disk.
    ///
    /// # Errors
    ///
    /// Those of [`update`](Self::update).
    pub fn flush(&self) -> Result<()> {
        let shared = self.file.shared();
        shared
            .submit(self.answer_timeout, false, operation::flush())?
            .wait()
    }

    /// Blocks until what was queued is on disk and the file is closed, for all its handles.
    ///
    /// From the moment of the call new operations get [`Error::Closed`](crate::Error::Closed).
    /// Closing again reports the same.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`](crate::Error::Unavailable): the storage kept the file from being
    /// closed cleanly; what was answered is on disk. [`Error::InsideUpdate`](crate::Error::InsideUpdate).
    pub fn close(&self) -> Result<()> {
        self.file.shared().close(self.answer_timeout)?.wait()
    }

    /// As [`close`](Self::close), without blocking; on any executor.
    ///
    /// The file is closing from this call on.
    ///
    /// # Errors
    ///
    /// Those of [`close`](Self::close).
    pub fn close_async(&self) -> Pending<()> {
        self.file.shared().close(self.answer_timeout).into()
    }
}
