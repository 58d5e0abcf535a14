//! Operations: pieces of work for the writer, and what each does inside the transaction.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::answer::Answered;
use super::batch::Batch;
use super::key::Key;
use super::row::Row;
use super::slot::{IfDamaged, Slot, Staged};
use super::sweep::SWEEP_LIMIT;
use super::table::{Stored, Table};
use crate::error::{Error, Result};

/// What a step in a transaction comes to: what its caller is told, or a fault of the whole batch.
pub(super) type Step<R> = Result<Answered<R>, redb::Error>;

/// A queued piece of work. The writer applies it, commits, and only then has it answer.
pub(super) trait Operation: Send {
    /// Reads, and writes into the transaction. An error fails the whole batch.
    fn apply(&mut self, batch: &mut Batch<'_>) -> Result<(), redb::Error>;

    /// Tells the caller: what came out, or the failure that kept it from the disk.
    fn answer(self: Box<Self>, failure: Option<Error>);

    /// Whether it may fill a transaction on its own.
    fn is_bulk(&self) -> bool;
}

/// The one kind of operation: a step in the transaction, and who waits for what it yields.
pub(super) struct Task<S, R> {
    step: Option<S>,
    answered: Option<Answered<R>>,
    caller: oneshot::Sender<Answered<R>>,
    is_bulk: bool,
    /// What it yields is in memory, whatever becomes of the transaction.
    is_in_memory: bool,
}

impl<S, R> Task<S, R>
where
    S: FnOnce(&mut Batch<'_>) -> Step<R> + Send + 'static,
    R: Send + 'static,
{
    pub(super) fn new(caller: oneshot::Sender<Answered<R>>, is_bulk: bool, step: S) -> Self {
        Self {
            step: Some(step),
            answered: None,
            caller,
            is_bulk,
            is_in_memory: false,
        }
    }

    /// As [`new`](Self::new), of a step that changes rows in memory only.
    pub(super) fn in_memory(caller: oneshot::Sender<Answered<R>>, step: S) -> Self {
        Self {
            is_in_memory: true,
            ..Self::new(caller, false, step)
        }
    }
}

impl<S, R> Operation for Task<S, R>
where
    S: FnOnce(&mut Batch<'_>) -> Step<R> + Send + 'static,
    R: Send + 'static,
{
    fn apply(&mut self, batch: &mut Batch<'_>) -> Result<(), redb::Error> {
        if let Some(step) = self.step.take() {
            self.answered = Some(step(batch)?);
        }
        Ok(())
    }

    fn answer(self: Box<Self>, failure: Option<Error>) {
        let answered = match failure {
            Some(_) if self.is_in_memory && self.answered.is_some() => self.answered,
            Some(failure) => Some(Err(failure)),
            None => self.answered,
        };
        if let Some(answered) = answered {
            // A caller that no longer waits has taken its chance to know.
            let _ = self.caller.send(answered);
        }
    }

    fn is_bulk(&self) -> bool {
        self.is_bulk
    }
}

/// Reads the rows of `keys`, hands them to `f`, and writes back what it leaves, or nothing at all
/// if any of them is damaged, cannot be stored, or `f` panics.
pub(super) fn update<V: Row, R, const N: usize>(
    table: Arc<Table>,
    keys: [Key; N],
    if_damaged: IfDamaged,
    f: impl FnOnce(&mut [Slot<V>; N]) -> R,
) -> impl FnOnce(&mut Batch<'_>) -> Step<R> {
    move |batch| {
        let now = batch.now();
        let open = batch.table(&table)?;
        let mut before = [const { Stored::Missing }; N];
        for (place, key) in before.iter_mut().zip(&keys) {
            *place = open.read(key.as_bytes())?;
        }
        let run = || {
            let mut slots = std::array::from_fn(|_| Slot::empty(now));
            for ((slot, key), stored) in slots.iter_mut().zip(&keys).zip(&before) {
                *slot = Slot::fill(&table, key, stored, now, if_damaged)?;
            }
            let result = f(&mut slots);
            let mut staged = [const { Staged::Keep }; N];
            for ((staged, slot), key) in staged.iter_mut().zip(slots).zip(&keys) {
                *staged = slot.stage(&table, key)?;
            }
            Ok((result, staged))
        };
        // The closure and the row's own (de)serialization are the caller's code.
        let (result, staged) = match catch_unwind(AssertUnwindSafe(run)) {
            Ok(Ok(done)) => done,
            Ok(Err(error)) => return Ok(Err(error)),
            Err(panic) => return Ok(Ok(Err(panic))),
        };
        for ((key, before), staged) in keys.iter().zip(&before).zip(staged) {
            match staged {
                Staged::Keep => {}
                Staged::Remove => open.delete(key.as_bytes(), &before.found())?,
                Staged::Put { value, ttl_ms } => {
                    let now = now.as_millis();
                    let expires_at = now.saturating_add(ttl_ms);
                    let before = before.found();
                    open.write(key.as_bytes(), &before, &value, ttl_ms, expires_at, now)?;
                }
            }
        }
        Ok(Ok(Ok(result)))
    }
}

/// Stamps and creates a table, unless it is there; refuses one of another kind.
pub(super) fn stamp(
    path: std::path::PathBuf,
    table: Arc<Table>,
) -> impl FnOnce(&mut Batch<'_>) -> Step<()> {
    move |batch| {
        match batch.stamp_of(&table.name)? {
            Some(found) if found != table.kind => {
                return Ok(Err(Error::WrongKind {
                    path,
                    table: table.name.clone(),
                    found,
                    expected: table.kind,
                }));
            }
            Some(_) => {}
            None => batch.stamp(&table)?,
        }
        batch.adopt(&table)?.effects.ready = true;
        Ok(Ok(Ok(())))
    }
}

/// Looks at up to 1,000 entries of the deadline index; yields how many rows had expired, and whether
/// there is more to do.
pub(super) fn sweep(table: Arc<Table>) -> impl FnOnce(&mut Batch<'_>) -> Step<(u64, bool)> {
    move |batch| {
        let now = batch.now().as_millis();
        let open = batch.table(&table)?;
        let before = open.effects.swept;
        let looked_at = open.sweep(now, SWEEP_LIMIT)?;
        let swept = open.effects.swept - before;
        Ok(Ok(Ok((swept, looked_at >= SWEEP_LIMIT))))
    }
}

/// Removes up to 1,000 rows after the key `after` whose keys start with `prefix`; yields how many,
/// and the last of their keys.
pub(super) fn remove_prefix(
    table: Arc<Table>,
    prefix: Vec<u8>,
    after: Option<Vec<u8>>,
) -> impl FnOnce(&mut Batch<'_>) -> Step<(u64, Option<Vec<u8>>)> {
    move |batch| {
        let open = batch.table(&table)?;
        let keys = open.keys_with(&prefix, after.as_deref(), SWEEP_LIMIT)?;
        for key in &keys {
            let stored = open.read(key)?;
            open.delete(key, &stored.found())?;
        }
        Ok(Ok(Ok((keys.len() as u64, keys.into_iter().next_back()))))
    }
}

/// Does nothing: its answer says that everything queued before is on disk.
pub(super) fn flush() -> impl FnOnce(&mut Batch<'_>) -> Step<()> {
    |_| Ok(Ok(Ok(())))
}
