//! The writer: one thread per open file, the only one that writes to it.
//!
//! It takes what is queued, opens one transaction, applies each operation in order, commits, and
//! only then has them answer: callers that come together share the syncs of one commit. When the
//! storage fails it closes the database and reopens it, with growing pauses, until it is well.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::batch::Batch;
use super::file::Shared;
use super::flush::Flush;
use super::operation::Operation;
use super::queue::Work;
use super::sweep::SWEEP_LIMIT;
use crate::clock::Timestamp;
use crate::error::{Applied, Cause, Error, Result};

/// How long after the earliest deadline an idle writer sweeps, so that what expires together
/// leaves together.
const SWEEP_DELAY: Duration = Duration::from_secs(1);

const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

thread_local! {
    static IS_WRITER: Cell<bool> = const { Cell::new(false) };
    static IS_IN_CLOSURE: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread must not wait for a writer, of whatever file: it is one, or holds the lock of
/// a row that one may want.
pub(super) fn is_current_thread() -> bool {
    IS_WRITER.get() || IS_IN_CLOSURE.get()
}

/// Runs a caller's closure, which does not panic, under the lock of its row.
pub(super) fn without_vaults<T>(closure: impl FnOnce() -> T) -> T {
    let before = IS_IN_CLOSURE.replace(true);
    let result = closure();
    IS_IN_CLOSURE.set(before);
    result
}

/// An error on a writer's thread, where waiting for a writer might wait for itself.
pub(super) fn refuse_current_thread() -> Result<()> {
    if is_current_thread() {
        return Err(Error::InsideUpdate);
    }
    Ok(())
}

/// What a panic of the storage or the clock says, as the source of an error.
pub(super) fn panic_cause(panic: &(dyn Any + Send)) -> Cause {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    Cause::new(format!("a panic: {}", text.unwrap_or("without a message")))
}

/// What an error of redb says, as the source of an error.
pub(super) fn cause(error: redb::Error) -> Cause {
    match error {
        redb::Error::PreviousIo => {
            Cause::new("an I/O operation failed before; the file is being opened again")
        }
        error => Cause::new(error),
    }
}

/// Runs what may run other people's code: wakers, and whatever dropping an answer drops.
pub(super) fn shielded(run: impl FnOnce()) {
    let _ = catch_unwind(AssertUnwindSafe(run));
}

fn answer(operation: Box<dyn Operation>, failure: Option<Error>) {
    shielded(|| operation.answer(failure));
}

#[derive(Debug)]
pub(super) struct Writer {
    file: Arc<Shared>,
    /// The flush under way.
    flush: Option<Flush>,
    /// How many flushes have begun: tables take turns.
    turn: usize,
    /// How long the next try to open a file that failed waits; longer each time until a commit is well.
    pause: Cell<Duration>,
}

impl Writer {
    pub(super) const fn new(file: Arc<Shared>) -> Self {
        Self {
            file,
            flush: None,
            turn: 0,
            pause: Cell::new(FIRST_PAUSE),
        }
    }

    pub(super) fn run(mut self) {
        IS_WRITER.set(true);
        let worked = catch_unwind(AssertUnwindSafe(|| self.work()));
        let report = match worked {
            Ok(()) => self.close(),
            // A clock of the user's, say. Nobody may wait for a writer that is gone.
            Err(panic) => {
                let cause = panic_cause(&*panic);
                self.file.queue.close();
                self.file.close_buffers();
                let waiting = self.file.queue.fail(cause.clone());
                self.answer_failed(waiting, Applied::Unknown, &cause);
                self.close();
                Some(cause)
            }
        };
        self.file.ended(report);
    }

    fn work(&mut self) {
        loop {
            self.begin_flush_that_is_due();
            match self.file.queue.next(self.until_next()) {
                Work::Batch(operations) => {
                    self.commit(operations);
                }
                Work::Due if self.is_sweep_due() => {
                    self.commit(Vec::new());
                }
                Work::Due | Work::Wake => {}
                Work::Look => {
                    self.forget_what_is_due();
                    self.commit(Vec::new());
                }
                Work::Close => return self.flush_all(),
            }
            self.flush_one_chunk();
        }
    }

    /// Begins the flush that is due, unless one is under way.
    fn begin_flush_that_is_due(&mut self) {
        if self.flush.is_some() {
            return;
        }
        let tables = self.file.ready_tables();
        let in_turn = tables.iter().cycle().skip(self.turn % tables.len().max(1));
        let due = in_turn
            .take(tables.len())
            .filter(|table| table.flush_in() == Some(Duration::ZERO));
        self.flush = due.filter_map(Flush::begin).next();
        self.turn = self.turn.wrapping_add(usize::from(self.flush.is_some()));
    }

    fn flush_one_chunk(&mut self) {
        let Some(mut flush) = self.flush.take() else {
            return;
        };
        match flush.chunk() {
            None => flush.end(true),
            Some(chunk) => {
                if self.commit(vec![chunk]) {
                    self.flush = Some(flush);
                } else {
                    flush.end(false);
                }
            }
        }
    }

    /// Carries everything to the file, unless the disk refuses.
    fn flush_all(&self) {
        // Also of a table that became ready while the file was being closed.
        self.file.close_buffers();
        for table in self.file.ready_tables() {
            while let Some(mut flush) = Flush::begin(&table) {
                // Closing ended the attempts to open it: it may be well by now.
                let mut carried = self.is_open_again();
                while carried && let Some(chunk) = flush.chunk() {
                    carried = self.commit(vec![chunk]);
                }
                flush.end(carried);
                if !carried {
                    return;
                }
            }
        }
    }

    /// Whether the database is open; one that failed is tried once more.
    fn is_open_again(&self) -> bool {
        let reopen = || self.file.reopen();
        self.file.has_database() || matches!(catch_unwind(AssertUnwindSafe(reopen)), Ok(Ok(())))
    }

    /// How long an idle writer may sleep; `None`: until it is woken.
    fn until_next(&self) -> Option<Duration> {
        if self.flush.is_some() {
            return Some(Duration::ZERO);
        }
        let tables = self.file.ready_tables();
        let flush = tables.iter().filter_map(|table| table.flush_in()).min();
        [flush, self.until_sweep()].into_iter().flatten().min()
    }

    fn is_sweep_due(&self) -> bool {
        self.until_sweep() == Some(Duration::ZERO)
    }

    /// Closes the database, and says what kept it from closing well.
    fn close(&self) -> Option<Cause> {
        let Some(database) = self.file.take_database() else {
            return self.file.queue.failing();
        };
        match catch_unwind(AssertUnwindSafe(|| database.close())) {
            Ok(Ok(())) => self.file.source.check_place().err().map(Cause::new),
            Ok(Err(error)) => Some(Cause::new(error)),
            Err(panic) => Some(panic_cause(&*panic)),
        }
    }

    /// Applies the operations in one transaction and has them answer. Says whether that went well.
    fn commit(&self, mut operations: Vec<Box<dyn Operation>>) -> bool {
        // It is known as long as the commit has not begun.
        let mut applied = Applied::No;
        let run = || self.transact(&mut operations, &mut applied);
        let cause = match catch_unwind(AssertUnwindSafe(run)) {
            Ok(Ok(())) => {
                operations.into_iter().for_each(|done| answer(done, None));
                if applied == Applied::Unknown {
                    // A transaction that changed nothing says nothing of the disk.
                    self.pause.set(FIRST_PAUSE);
                }
                return true;
            }
            Ok(Err(error)) => cause(error),
            Err(panic) => panic_cause(&*panic),
        };
        tracing::error!(path = ?self.file.path, %cause, "the vault's storage failed");
        let turned_away = self.file.queue.fail(cause.clone());
        self.answer_failed(operations, applied, &cause);
        self.answer_failed(turned_away, Applied::No, &cause);
        self.reopen();
        false
    }

    fn answer_failed(&self, operations: Vec<Box<dyn Operation>>, applied: Applied, cause: &Cause) {
        for operation in operations {
            let failure = self.file.unavailable(applied, cause.clone());
            answer(operation, Some(failure));
        }
    }

    fn transact(
        &self,
        operations: &mut Vec<Box<dyn Operation>>,
        applied: &mut Applied,
    ) -> Result<(), redb::Error> {
        self.check_place()?;
        let txn = self.file.begin_write()?;
        let mut batch = Batch::new(&txn, &*self.file.settings.clock);
        let mut done = 0;
        loop {
            for operation in operations.iter_mut().skip(done) {
                operation.apply(&mut batch)?;
            }
            done = operations.len();
            // Who came meanwhile shares this commit instead of waiting for the next.
            if !self.file.queue.board(operations) {
                break;
            }
        }
        let is_full = operations.last().is_some_and(|last| last.is_bulk());
        if self.file.settings.background_sweep && !is_full {
            self.sweep(&mut batch)?;
        }
        let (changed, effects) = batch.finish();
        if changed {
            *applied = Applied::Unknown;
            // Nobody is told that something is stored which nobody will find.
            let committed = txn.commit().map_err(redb::Error::from);
            if let Err(error) = committed.and_then(|()| self.check_place()) {
                for (table, effects) in &effects {
                    table.doubt(effects);
                }
                return Err(error);
            }
        } else {
            txn.abort()?;
        }
        for (table, effects) in effects {
            table.record(&effects);
        }
        Ok(())
    }

    fn check_place(&self) -> Result<(), redb::Error> {
        self.file.source.check_place().map_err(redb::Error::Io)
    }

    /// Takes due rows along.
    fn sweep(&self, batch: &mut Batch<'_>) -> Result<(), redb::Error> {
        let now = batch.now().as_millis();
        let mut budget = SWEEP_LIMIT;
        for table in self.file.ready_tables() {
            if budget > 0 && table.may_be_due(now) {
                budget -= batch.table(&table)?.sweep(now, budget)?.min(budget);
            }
        }
        Ok(())
    }

    /// How long until the sweep is due; `None`: nothing is filed.
    fn until_sweep(&self) -> Option<Duration> {
        if !self.file.settings.background_sweep {
            return None;
        }
        let tables = self.file.ready_tables();
        let due = tables.iter().map(|table| table.due.load(Ordering::Relaxed));
        match due.min() {
            None | Some(u64::MAX) => None,
            Some(0) => Some(Duration::ZERO),
            Some(due) => {
                let at = Timestamp::from_millis(due).saturating_add(SWEEP_DELAY);
                Some(at.saturating_since(self.file.settings.clock.now()))
            }
        }
    }

    fn forget_what_is_due(&self) {
        for table in self.file.ready_tables() {
            table.due.store(0, Ordering::Relaxed);
        }
    }

    /// Closes the failed database and opens it again once its storage is well.
    fn reopen(&self) {
        loop {
            // A handle that failed refuses everything, closing included.
            let failed = self.file.take_database();
            let _ = catch_unwind(AssertUnwindSafe(|| drop(failed)));
            let pause = self.pause.get();
            self.pause.set(LONGEST_PAUSE.min(pause * 2));
            if self.file.queue.pause(pause) {
                return;
            }
            let cause = match catch_unwind(AssertUnwindSafe(|| self.file.reopen())) {
                Ok(Ok(())) => break,
                Ok(Err(error)) => Cause::new(error),
                Err(panic) => panic_cause(&*panic),
            };
            tracing::warn!(%cause, "the vault's storage is still failing");
            self.file.queue.fail(cause);
        }
        self.forget_what_is_due();
        self.file.queue.recovered();
        tracing::info!(path = ?self.file.path, "the vault's storage is well again");
    }
}
