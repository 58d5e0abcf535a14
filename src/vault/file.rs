//! An open file: what its handles and its writer share, and how it closes.
//!
//! Handles hold an [`OpenFile`]; the writer thread holds a [`Shared`]. When the last handle goes,
//! the queue closes, the writer drains it and ends.
//!
//! Lock order: registry, slot, then tables, then database, then queue, then ending. None is held
//! across a commit, or while a caller's closure or waker runs.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::thread;
use std::time::Duration;

use redb::{Database, ReadTransaction, ReadableDatabase, WriteTransaction};

use super::answer::{Answer, Answered};
use super::batch::Batch;
use super::durability::Durability;
use super::key::Key;
use super::open::Source;
use super::operation::{self, Operation, Step, Task};
use super::overlay::{self, Buffer};
use super::queue::{QUEUE_LIMIT, Queue, Refused};
use super::registry::Slot;
use super::settings::{FileSettings, TableSettings, WantedOfTable};
use super::stamp::Expected;
use super::table::{self, Stored, Table, rows_name};
use super::writer::{self, Writer};
use crate::clock::Timestamp;
use crate::error::{Applied, Cause, Error, Result};

/// What every handle of a file holds. Dropping the last one closes the file.
#[derive(Debug)]
pub(super) struct OpenFile {
    shared: Arc<Shared>,
}

/// What the handles and the writer of a file share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) path: Arc<Path>,
    pub(super) source: Source,
    pub(super) settings: FileSettings,
    pub(super) queue: Arc<Queue>,
    /// `None` while the writer reopens it, and once it is closed.
    pub(super) database: RwLock<Option<Database>>,
    /// By name and kind: which kind is right is for the stamp to say.
    tables: Mutex<Tables>,
    ending: Mutex<Ending>,
    /// Held by the registry for as long as it is occupied.
    slot: Weak<Slot>,
}

/// A table, and whether a handle has it open: settings go with the last one.
type Tables = BTreeMap<(String, &'static str), (Arc<Table>, Weak<()>)>;

/// How a file ended, and who waits to hear it.
#[derive(Debug, Default)]
struct Ending {
    report: Option<Option<Cause>>,
    waiting: Vec<oneshot::Sender<Answered<()>>>,
}

impl OpenFile {
    /// Opens the file and starts its writer.
    pub(super) fn new(
        source: Source,
        settings: FileSettings,
        expected: Expected<'_>,
        slot: Weak<Slot>,
    ) -> Result<Self> {
        let database = source.open(&settings, &[expected])?;
        let queue = Arc::new(Queue::default());
        let waiter: Weak<Queue> = Arc::downgrade(&queue);
        settings.clock.wake_on_change(waiter);
        let shared = Arc::new(Shared {
            path: source.path().into(),
            source,
            settings,
            queue,
            database: RwLock::new(Some(database)),
            tables: Mutex::default(),
            ending: Mutex::default(),
            slot,
        });
        let writer = Writer::new(Arc::clone(&shared));
        let thread = thread::Builder::new().name("ratevault-writer".into());
        match thread.spawn(move || writer.run()) {
            Ok(_) => Ok(Self { shared }),
            Err(source) => Err(Error::Open {
                path: shared.path.to_path_buf(),
                source,
            }),
        }
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// The table `name`, created and stamped if it is not there.
    pub(super) fn table(
        &self,
        name: &str,
        kind: &'static str,
        wanted: &WantedOfTable,
        buffer: impl FnOnce(overlay::Place, Duration, usize) -> Arc<dyn Buffer>,
    ) -> Result<TableHandle> {
        let path = &self.shared.path;
        let handle = self.shared.find_or_make(name, kind, wanted, buffer);
        handle.table.settings.check(wanted, path)?;
        let stamp = operation::stamp(path.to_path_buf(), Arc::clone(&handle.table));
        self.shared.submit(None, false, stamp)?.wait()?;
        Ok(handle)
    }
}

/// A table as a vault's handle has it.
#[derive(Clone, Debug)]
pub(super) struct TableHandle {
    pub(super) table: Arc<Table>,
    /// Held by handles alone, where the table is also held by what is under way.
    _in_use: Arc<()>,
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        self.shared.queue.close();
        // Inside a closure this is the thread that would have to close it: it does so afterwards.
        if !writer::is_current_thread() {
            let _ = self.shared.close(None).map(Answer::wait);
        }
    }
}

impl Shared {
    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The table `name` with the settings it has, or with these if no handle has it open.
    fn find_or_make(
        &self,
        name: &str,
        kind: &'static str,
        wanted: &WantedOfTable,
        buffer: impl FnOnce(overlay::Place, Duration, usize) -> Arc<dyn Buffer>,
    ) -> TableHandle {
        let mut tables = self.tables();
        let key = (name.to_owned(), kind);
        let known = tables.get(&key).and_then(|(table, in_use)| {
            let in_use = match in_use.upgrade() {
                Some(in_use) => in_use,
                // What is in memory is the newest: it stays for as long as the file is open.
                None if table.buffer.is_some() && table.is_ready() => Arc::default(),
                None => return None,
            };
            Some((Arc::clone(table), in_use))
        });
        let (table, in_use) = known.unwrap_or_else(|| {
            let settings = TableSettings::new(wanted);
            let buffer = match settings.durability {
                Durability::Buffered { flush_every } => {
                    let place = self.place_of(name);
                    Some(buffer(place, flush_every, settings.buffer_bytes))
                }
                Durability::Committed => None,
            };
            (
                Arc::new(Table::new(name, kind, settings, buffer)),
                Arc::default(),
            )
        });
        tables.insert(key, (Arc::clone(&table), Arc::downgrade(&in_use)));
        TableHandle {
            table,
            _in_use: in_use,
        }
    }

    fn place_of(&self, table: &str) -> overlay::Place {
        overlay::Place {
            path: Arc::clone(&self.path),
            table: table.to_owned(),
            clock: Arc::clone(&self.settings.clock),
            queue: Arc::clone(&self.queue),
        }
    }

    /// Every table that a handle has opened and that is known to be of its kind.
    pub(super) fn ready_tables(&self) -> Vec<Arc<Table>> {
        let tables = self.tables();
        let ready = tables.values().filter(|(table, _)| table.is_ready());
        ready.map(|(table, _)| Arc::clone(table)).collect()
    }

    /// Queues an operation. It counts from here on, whether or not anybody waits for the answer.
    pub(super) fn submit<R: Send + 'static>(
        &self,
        timeout: Option<Duration>,
        is_bulk: bool,
        step: impl FnOnce(&mut Batch<'_>) -> Step<R> + Send + 'static,
    ) -> Result<Answer<R>> {
        let task = |caller| -> Box<dyn Operation> { Box::new(Task::new(caller, is_bulk, step)) };
        self.submit_operation(timeout, task)
    }

    /// As [`submit`](Self::submit), of an operation that is made here.
    pub(super) fn submit_operation<R>(
        &self,
        timeout: Option<Duration>,
        operation: impl FnOnce(oneshot::Sender<Answered<R>>) -> Box<dyn Operation>,
    ) -> Result<Answer<R>> {
        writer::refuse_current_thread()?;
        let (caller, receiver) = oneshot::channel();
        match self.queue.push(operation(caller)) {
            Ok(()) => Ok(Answer::new(receiver, Arc::clone(&self.path), timeout)),
            Err(Refused::Closing) => Err(self.closed()),
            Err(Refused::Failing(cause)) => Err(self.unavailable(Applied::No, cause)),
            Err(Refused::Full) => Err(Error::Overloaded {
                path: self.path.to_path_buf(),
                limit: QUEUE_LIMIT,
            }),
        }
    }

    /// Runs `read` on the latest commit. It waits for nobody, and must not hold on to it for long.
    pub(super) fn read<T>(
        &self,
        read: impl FnOnce(&ReadTransaction) -> Result<T, redb::Error>,
    ) -> Result<T> {
        let run = || {
            let database = self.database.read().unwrap_or_else(PoisonError::into_inner);
            let txn = match &*database {
                Some(database) => database.begin_read().map_err(redb::Error::from)?,
                None => return Ok(None),
            };
            drop(database);
            read(&txn).map(Some)
        };
        let cause = match catch_unwind(AssertUnwindSafe(run)) {
            Ok(Ok(Some(value))) => return Ok(value),
            Ok(Ok(None)) => return Err(self.down()),
            Ok(Err(_)) if self.queue.is_closing() => return Err(self.closed()),
            Ok(Err(error)) => writer::cause(error),
            Err(panic) => writer::panic_cause(&*panic),
        };
        self.queue.nudge();
        Err(self.unavailable(Applied::No, cause))
    }

    /// The row of `key` in the latest commit, and the time.
    pub(super) fn row(&self, table: &Table, key: &Key) -> Result<(Stored, Timestamp)> {
        let stored = self.read(|txn| {
            let rows = txn.open_table(table::rows(&rows_name(&table.name)))?;
            let row = rows.get(key.as_bytes())?;
            let row = row.as_ref().map(|row| row.value());
            Ok(Stored::read(key.as_bytes(), row))
        })?;
        Ok((stored, self.settings.clock.now()))
    }

    /// Why there was no database.
    fn down(&self) -> Error {
        if self.queue.is_closing() {
            return self.closed();
        }
        // The storage may be well again by now.
        let cause = self.queue.failing();
        let cause = cause.unwrap_or_else(|| Cause::new("the file was being opened again"));
        self.unavailable(Applied::No, cause)
    }

    pub(super) fn begin_write(&self) -> Result<WriteTransaction, redb::Error> {
        let database = self.database.read().unwrap_or_else(PoisonError::into_inner);
        match &*database {
            Some(database) => Ok(database.try_begin_write()?),
            None => Err(redb::Error::DatabaseClosed),
        }
    }

    pub(super) fn has_database(&self) -> bool {
        let database = self.database.read();
        database.unwrap_or_else(PoisonError::into_inner).is_some()
    }

    pub(super) fn take_database(&self) -> Option<Database> {
        let mut database = self
            .database
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        database.take()
    }

    /// Opens the database again, with the tables it had.
    pub(super) fn reopen(&self) -> Result<()> {
        let tables = self.ready_tables();
        let expected = tables.iter().map(|table| Expected {
            table: &table.name,
            kind: table.kind,
            is_there: true,
        });
        let expected: Vec<_> = expected.collect();
        let database = self.source.reopen(&self.settings, &expected)?;
        let mut place = self
            .database
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        *place = Some(database);
        Ok(())
    }

    pub(super) fn unavailable(&self, applied: Applied, source: Cause) -> Error {
        Error::Unavailable {
            path: self.path.to_path_buf(),
            applied,
            source,
        }
    }

    fn closed(&self) -> Error {
        Error::Closed {
            path: self.path.to_path_buf(),
        }
    }

    /// Closes the file for all handles; the answer comes when the writer has ended.
    pub(super) fn close(&self, timeout: Option<Duration>) -> Result<Answer<()>> {
        writer::refuse_current_thread()?;
        let (caller, receiver) = oneshot::channel();
        let mut ending = self.ending.lock().unwrap_or_else(PoisonError::into_inner);
        match &ending.report {
            Some(report) => drop(caller.send(self.outcome(report.clone()))),
            None => ending.waiting.push(caller),
        }
        drop(ending);
        self.close_buffers();
        self.queue.close();
        Ok(Answer::new(receiver, Arc::clone(&self.path), timeout))
    }

    /// Nothing is answered from memory any more.
    pub(super) fn close_buffers(&self) {
        for table in self.ready_tables() {
            if let Some(buffer) = &table.buffer {
                buffer.close();
            }
        }
    }

    /// The writer's last act: the file can be opened again, and whoever waits hears how it ended.
    pub(super) fn ended(&self, report: Option<Cause>) {
        if let Some(slot) = self.slot.upgrade() {
            slot.vacate();
        }
        let mut ending = self.ending.lock().unwrap_or_else(PoisonError::into_inner);
        ending.report = Some(report.clone());
        let waiting = std::mem::take(&mut ending.waiting);
        drop(ending);
        for waiting in waiting {
            writer::shielded(|| drop(waiting.send(self.outcome(report.clone()))));
        }
    }

    fn outcome(&self, report: Option<Cause>) -> Answered<()> {
        match report {
            None => Ok(Ok(())),
            Some(cause) => Err(self.unavailable(Applied::Unknown, cause)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HitLog, Vault};

    #[test]
    fn a_file_that_was_being_opened_again_a_moment_ago_is_not_a_closed_one() {
        let vault: Vault<HitLog> = Vault::builder("limits").in_memory().open().unwrap();
        let shared = vault.file.shared();
        let database = shared.take_database();
        let error = vault.len().unwrap_err();
        let applied = match &error {
            Error::Unavailable { applied, .. } => *applied,
            other => panic!("{other:?}"),
        };
        assert_eq!(applied, Applied::No);
        assert!(error.to_string().contains("opened again"), "{error}");
        *shared.database.write().unwrap() = database;
        assert!(vault.is_empty().unwrap());
    }
}
