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
//! | `durability`, `overlay`, `flush` | rows in memory in front of a table, and how they come to the file |
//! | `table`, `deadline`, `sweep`, `bound` | what a transaction does to rows, and which of them go |
//! | `key`, `row`, `codec`, `stamp` | the format of the file, documented where it is encoded |
//! | `scan`, `reader` | reading many rows, from inside and from outside |
//! | `storage`, `place` | where the bytes are, and whether they still are there |

mod answer;
mod batch;
mod bound;
mod builder;
mod codec;
mod create;
mod deadline;
mod durability;
mod file;
mod flush;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod key;
mod open;
mod operation;
mod overlay;
mod place;
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

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use redb::ReadableTableMetadata;

pub use answer::Pending;
pub use builder::{VaultBuilder, default_path};
pub use durability::Durability;
pub use key::{Client, Key};
pub use reader::TableInfo;
pub use row::Row;
pub use scan::{Entry, Scan};
pub use slot::Slot;
pub use storage::{MemoryStorage, Storage};

pub(crate) use codec::decode as decode_value;
pub(crate) use key::{ClientBytes, KeyParts, corrupt_row};
pub(crate) use overlay::Change;
pub(crate) use reader::Reader;
pub(crate) use scan::Page;
pub(crate) use table::Stored;
#[cfg(feature = "http")]
pub(crate) use timer::Alarm;

use crate::clock::Timestamp;
use crate::error::{Cause, Error, Result};
use answer::Answer;
use batch::Batch;
use file::{OpenFile, TableHandle};
use flush::Flush;
use operation::{Operation, Task};
use overlay::{Attempt, Buffer, Overlay, Patience};
use slot::IfDamaged;
use table::{Table, rows_name};

/// A named table of `V` with a time to live per row, in a file.
///
/// Cheap to clone. All vaults on one file in one process share it; another process that wants to
/// write gets [`Error::Locked`]. A call that changes something returns after
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
    overlay: Option<Arc<Overlay<V>>>,
    answer_timeout: Option<Duration>,
}

impl<V> Clone for Vault<V> {
    fn clone(&self) -> Self {
        Self {
            file: Arc::clone(&self.file),
            handle: self.handle.clone(),
            overlay: self.overlay.clone(),
            answer_timeout: self.answer_timeout,
        }
    }
}

/// Counters of one table.
#[derive(Clone, Debug)]
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
    /// Flushes of a buffered table that were completed since the file was opened.
    pub flushes: u64,
    /// Rows that those flushes, and the one under way, have carried to the disk.
    pub rows_flushed: u64,
    /// How long the oldest change waits that is only in memory, if the table is buffered and there
    /// is one.
    pub oldest_unflushed: Option<Duration>,
    /// Why the last flush failed, if it did, or why none can be tried at the moment.
    pub last_flush_error: Option<Cause>,
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

    /// The value of `key`, if it has not expired. Waits for nobody, but a closure that holds the row of
    /// a buffered table.
    ///
    /// # Errors
    ///
    /// - [`Error::CorruptRow`]: this row is damaged.
    /// - [`Error::Unavailable`]: the storage fails.
    /// - [`Error::Closed`]: the vault was closed.
    /// - [`Error::InsideUpdate`]: called from an `update` closure, of a buffered table.
    pub fn get(&self, key: &Key) -> Result<Option<V>> {
        let encoded = |value: Option<&V>, _| value.map(codec::encode);
        self.refuse_under_a_lock()?;
        if let Some(overlay) = &self.overlay
            && let Ok(found) = overlay.look(key, encoded)
        {
            let bytes = found?.transpose().ok().flatten();
            return Ok(bytes.and_then(|bytes| codec::decode(&bytes)));
        }
        let (stored, now) = self.file.shared().row(self.table(), key)?;
        Ok(Slot::fill(self.table(), key, &stored, now, IfDamaged::Refuse)?.take())
    }

    /// What `f` makes of the value of `key`, if it has not expired, and of the time.
    pub(crate) fn look<T>(
        &self,
        key: &Key,
        f: impl FnOnce(Option<&V>, Timestamp) -> T,
    ) -> Result<T> {
        self.refuse_under_a_lock()?;
        let f = match &self.overlay {
            None => f,
            Some(overlay) => match overlay.look(key, f) {
                Ok(found) => return found,
                Err(f) => f,
            },
        };
        let (stored, now) = self.file.shared().row(self.table(), key)?;
        let slot = Slot::fill(self.table(), key, &stored, now, IfDamaged::Refuse)?;
        Ok(f(slot.value(), now))
    }

    /// Blocks until `value` is stored under `key`, to live for `ttl`: on disk, unless the table is
    /// buffered.
    ///
    /// # Errors
    ///
    /// Those of [`update`](Self::update), except that a damaged row is replaced.
    pub fn put(&self, key: &Key, value: V, ttl: Duration) -> Result<()> {
        let put = move |slot: &mut Slot<V>| slot.put(value, ttl);
        self.apply(key, IfDamaged::Replace, put)
    }

    /// Blocks until the row of `key` is gone, also if it was damaged: from the disk, unless the table is
    /// buffered. Says whether there was one that had not expired.
    ///
    /// # Errors
    ///
    /// Those of [`update`](Self::update), except that a damaged row is removed.
    pub fn remove(&self, key: &Key) -> Result<bool> {
        let remove = |slot: &mut Slot<V>| {
            slot.remove();
            slot.found()
        };
        self.apply(key, IfDamaged::Replace, remove)
    }

    /// Blocks until every row of `endpoint` is gone from the disk, and says how many there were.
    ///
    /// At most 1,000 rows go in one transaction, so that others are served meanwhile. A row that is
    /// written meanwhile may stay.
    ///
    /// # Errors
    ///
    /// Those of [`update`](Self::update), except that damaged rows are removed too, and
    /// [`Error::EndpointTooLong`].
    pub fn remove_endpoint(&self, endpoint: &str) -> Result<u64> {
        let prefix = Key::prefix(endpoint)?;
        self.flush_buffer()?;
        let (mut removed, mut after) = (0, None);
        loop {
            let table = Arc::clone(self.table());
            let step = operation::remove_prefix(table, prefix.clone(), after);
            let submitted = self.file.shared().submit(self.answer_timeout, true, step);
            let step = submitted.and_then(Answer::wait);
            let (count, last) = step.map_err(|error| error.in_part(removed > 0))?;
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
    /// With [`Durability::Buffered`] this does not wait for the disk, unless the row has to be read
    /// or there is no room in memory; `f` runs under the row's lock, mostly on this thread.
    ///
    /// # Errors
    ///
    /// - [`Error::CorruptRow`]: this row is damaged; `f` is not called.
    /// - [`Error::Encode`]: the value left cannot be stored.
    /// - [`Error::Unavailable`]: the storage fails, or did not answer
    ///   within the answer timeout.
    /// - [`Error::Overloaded`]: 16,384 operations are already waiting.
    /// - [`Error::Closed`]: the vault was closed.
    /// - [`Error::InsideUpdate`]: called from such a closure.
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
        self.apply(key, IfDamaged::Refuse, f)
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
        let Some(overlay) = &self.overlay else {
            return self.submit(key, IfDamaged::Refuse, f).into();
        };
        if let Err(error) = writer::refuse_current_thread() {
            return Pending::failed(error);
        }
        // The file is never read here.
        let never = |_: &Key| Ok(Stored::Missing);
        match overlay.update(key, IfDamaged::Refuse, Patience::None, never, f) {
            Attempt::Done(answered) => Pending::ready(answered),
            Attempt::Elsewhere(f) => self
                .submit_buffered(overlay, key, IfDamaged::Refuse, f)
                .into(),
        }
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

    /// An error where this thread may hold the lock of the very row that it wants to look at.
    fn refuse_under_a_lock(&self) -> Result<()> {
        match &self.overlay {
            None => Ok(()),
            Some(_) => writer::refuse_current_thread(),
        }
    }

    /// Whether changes are decided in memory.
    pub(crate) const fn is_buffered(&self) -> bool {
        self.overlay.is_some()
    }

    /// Makes a change in its place, if the table is buffered and the row of `key` in memory; if not,
    /// it has to be done by `update`.
    #[inline(always)]
    pub(crate) fn change_in_memory<C: Change<V>>(
        &self,
        key: KeyParts<'_>,
        change: C,
    ) -> Option<C::Answer>
    where
        V: Default,
    {
        match &self.overlay {
            Some(overlay) if !writer::is_current_thread() => overlay.change(key, change),
            _ => None,
        }
    }

    /// Blocks until `f` is applied, and on disk if the table is not buffered.
    fn apply<R, F>(&self, key: &Key, if_damaged: IfDamaged, f: F) -> Result<R>
    where
        F: FnOnce(&mut Slot<V>) -> R + Send + 'static,
        R: Send + 'static,
    {
        let Some(overlay) = &self.overlay else {
            return self.submit(key, if_damaged, f)?.wait();
        };
        writer::refuse_current_thread()?;
        let load = |key: &Key| {
            self.file
                .shared()
                .row(self.table(), key)
                .map(|(row, _)| row)
        };
        match overlay.update(key, if_damaged, Patience::Read, load, f) {
            Attempt::Done(answered) => answer::unwrap_answered(answered),
            Attempt::Elsewhere(f) => self.submit_buffered(overlay, key, if_damaged, f)?.wait(),
        }
    }

    /// Has the writer run `f` on a row in memory: it may read the file, and makes room by flushing.
    fn submit_buffered<R, F>(
        &self,
        overlay: &Arc<Overlay<V>>,
        key: &Key,
        if_damaged: IfDamaged,
        f: F,
    ) -> Result<Answer<R>>
    where
        F: FnOnce(&mut Slot<V>) -> R + Send + 'static,
        R: Send + 'static,
    {
        let (overlay, key) = (Arc::clone(overlay), key.clone());
        let (file, table) = (Arc::clone(self.file.shared()), Arc::clone(self.table()));
        let step = move |_: &mut Batch<'_>| {
            let load = |key: &Key| file.row(&table, key).map(|(row, _)| row);
            match overlay.update(&key, if_damaged, Patience::Writer, load, f) {
                Attempt::Done(answered) => Ok(answered),
                Attempt::Elsewhere(_) => Ok(Err(Error::InsideUpdate)),
            }
        };
        let task = |caller| -> Box<dyn Operation> { Box::new(Task::in_memory(caller, step)) };
        let shared = self.file.shared();
        shared.submit_operation(self.answer_timeout, task)
    }

    /// Blocks until everything that is dirty now is on disk.
    fn flush_buffer(&self) -> Result<()> {
        let table = self.table();
        writer::refuse_current_thread()?;
        let Some(mut flush) = Flush::begin(table) else {
            return Ok(());
        };
        let shared = self.file.shared();
        let mut carried = Ok(());
        while carried.is_ok()
            && let Some(chunk) = flush.chunk_asked_for()
        {
            let answer = shared.submit_operation(self.answer_timeout, chunk);
            carried = answer.and_then(Answer::wait);
        }
        flush.end(carried.is_ok());
        carried
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

    /// The rows that have not expired, in the order of their keys. Waits for nobody, except that a
    /// buffered table is flushed first; if that fails, its error is all there is.
    ///
    /// Rows are read in pages of 1,000, each from the latest commit; a row that changes meanwhile
    /// may be seen before or after its change. A damaged row is an error and the scan goes on.
    pub fn scan(&self) -> Scan<V> {
        let flushed = match &self.overlay {
            Some(_) => self.flush(),
            None => Ok(()),
        };
        Scan::new(Arc::clone(&self.file), Arc::clone(self.table()), flushed)
    }

    /// How many rows the table has on disk, those included that have expired and wait for the
    /// sweep. Never more than `max_keys`, once a bound that was lowered is reached. Costs the same
    /// however many there are.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`], [`Error::Closed`].
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
        let health = self.overlay.as_ref().map(|overlay| overlay.health());
        let health = health.unwrap_or_default();
        let failing = || self.file.shared().queue.failing();
        let cannot_flush = health.oldest_unflushed.and_then(|_| failing());
        Ok(Stats {
            rows: self.rows_or_last()?,
            max_keys: self.table().settings.max_keys,
            evicted: self.table().evicted.load(Ordering::Relaxed),
            swept: self.table().swept.load(Ordering::Relaxed),
            flushes: health.flushes,
            rows_flushed: health.rows_flushed,
            oldest_unflushed: health.oldest_unflushed,
            last_flush_error: health.last_flush_error.or(cannot_flush),
        })
    }

    /// How many rows the file has; of a buffered table, had, while the storage fails.
    fn rows_or_last(&self) -> Result<u64> {
        let last = &self.table().last_rows;
        match self.len() {
            Ok(rows) => last.store(rows, Ordering::Relaxed),
            Err(Error::Unavailable { .. }) if self.overlay.is_some() => {}
            Err(error) => return Err(error),
        }
        Ok(last.load(Ordering::Relaxed))
    }

    /// Blocks until every row that has expired is gone from the disk, and says how many went. A
    /// buffered table is flushed first.
    ///
    /// The background sweep does this on its own, about a second after rows expire.
    ///
    /// # Errors
    ///
    /// Those of [`update`](Self::update).
    pub fn sweep(&self) -> Result<u64> {
        let mut removed = 0;
        loop {
            // Each time: it passes over what is only in memory, and might see nothing else.
            let swept = self.flush_buffer().and_then(|()| {
                let step = operation::sweep(Arc::clone(self.table()));
                let shared = self.file.shared();
                shared.submit(self.answer_timeout, true, step)?.wait()
            });
            let (count, more) = swept.map_err(|error| error.in_part(removed > 0))?;
            removed += count;
            if !more {
                return Ok(removed);
            }
        }
    }

    /// Blocks until everything that was queued before, by any handle of the file, is on disk, and all
    /// changes of this table that were in memory only.
    ///
    /// # Errors
    ///
    /// Those of [`update`](Self::update).
    pub fn flush(&self) -> Result<()> {
        // What is queued may yet change rows in memory.
        self.drain()?;
        if self.overlay.is_some() {
            self.flush_buffer()?;
            // What others carry is in flight.
            self.drain()?;
        }
        Ok(())
    }

    /// Blocks until what is queued is done.
    fn drain(&self) -> Result<()> {
        let shared = self.file.shared();
        shared
            .submit(self.answer_timeout, false, operation::flush())?
            .wait()
    }

    /// Blocks until what was queued is on disk and the file is closed, for all its handles.
    ///
    /// From the moment of the call new operations get [`Error::Closed`].
    /// Closing again reports the same.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`]: the storage kept the file from being
    /// closed cleanly; what was answered is on disk, but for changes of a buffered table that no flush
    /// had carried. Also if the file was deleted, moved away or replaced: then it is in the file that was
    /// there. [`Error::InsideUpdate`].
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
