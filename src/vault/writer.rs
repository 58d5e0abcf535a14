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
}

/// Whether this thread is a writer, of whatever file: it must not wait for one.
pub(super) fn is_current_thread() -> bool {
    IS_WRITER.get()
}

/// An error on a writer's thread, where waiting for a writer might wait for itself.
pub(super) fn refuse_current_thread() -> Result<()> {
    if IS_WRITER.get() {
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
}

impl Writer {
    pub(super) const fn new(file: Arc<Shared>) -> Self {
        Self { file }
    }

    pub(super) fn run(self) {
        IS_WRITER.set(true);
        let worked = catch_unwind(AssertUnwindSafe(|| self.work()));
        let report = match worked {
            Ok(()) => self.close(),
            // A clock of the user's, say. Nobody may wait for a writer that is gone.
            Err(panic) => {
                let cause = panic_cause(&*panic);
                self.file.queue.close();
                let waiting = self.file.queue.fail(cause.clone());
                self.answer_failed(waiting, Applied::Unknown, &cause);
                self.close();
                Some(cause)
            }
        };
        self.file.ended(report);
    }

    fn work(&self) {
        loop {
            match self.file.queue.next(self.until_sweep()) {
                Work::Batch(operations) => self.commit(operations),
                Work::Due => self.commit(Vec::new()),
                Work::Look => {
                    self.forget_what_is_due();
                    self.commit(Vec::new());
                }
                Work::Close => return,
            }
        }
    }

    /// Closes the database, and says what kept it from closing well.
    fn close(&self) -> Option<Cause> {
        let Some(database) = self.file.take_database() else {
            return self.file.queue.failing();
        };
        match catch_unwind(AssertUnwindSafe(|| database.close())) {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(Cause::new(error)),
            Err(panic) => Some(panic_cause(&*panic)),
        }
    }

    /// Applies the operations in one transaction and has them answer.
    fn commit(&self, mut operations: Vec<Box<dyn Operation>>) {
        // It is known as long as the commit has not begun.
        let mut applied = Applied::No;
        let run = || self.transact(&mut operations, &mut applied);
        let cause = match catch_unwind(AssertUnwindSafe(run)) {
            Ok(Ok(())) => return operations.into_iter().for_each(|done| answer(done, None)),
            Ok(Err(error)) => cause(error),
            Err(panic) => panic_cause(&*panic),
        };
        tracing::error!(path = ?self.file.path, %cause, "the vault's storage failed");
        let turned_away = self.file.queue.fail(cause.clone());
        self.answer_failed(operations, applied, &cause);
        self.answer_failed(turned_away, Applied::No, &cause);
        self.reopen();
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
            txn.commit()?;
        } else {
            txn.abort()?;
        }
        for (table, effects) in effects {
            table.record(&effects);
        }
        Ok(())
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

    /// How long an idle writer may sleep; `None`: until it is woken.
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
        let mut pause = FIRST_PAUSE;
        loop {
            // A handle that failed refuses everything, closing included.
            let failed = self.file.take_database();
            let _ = catch_unwind(AssertUnwindSafe(|| drop(failed)));
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
            pause = LONGEST_PAUSE.min(pause * 2);
        }
        self.forget_what_is_due();
        self.file.queue.recovered();
        tracing::info!(path = ?self.file.path, "the vault's storage is well again");
    }
}
