//! The flush: what changed in memory goes to the file, in chunks.
//!
//! Operations of other tables of the file wait for one chunk at most.

use std::collections::VecDeque;
use std::sync::Arc;

use super::answer::Answered;
use super::batch::Batch;
use super::key::Key;
use super::operation::Operation;
use super::overlay::{Buffer, Flushed};
use super::table::Table;
use crate::error::{Cause, Error};

/// How many rows one transaction carries.
pub(super) const CHUNK: usize = 10_000;

/// A flush under way: the keys that are still to go, in order.
#[derive(Debug)]
pub(super) struct Flush {
    table: Arc<Table>,
    buffer: Arc<dyn Buffer>,
    since: u64,
    keys: VecDeque<Key>,
}

impl Flush {
    /// A flush of everything that is dirty in `table`; `None`: nothing is.
    pub(super) fn begin(table: &Arc<Table>) -> Option<Self> {
        let buffer = table.buffer.as_ref()?;
        let flush = Self {
            table: Arc::clone(table),
            buffer: Arc::clone(buffer),
            since: buffer.begin_flush(),
            keys: buffer.dirty_keys().into(),
        };
        if flush.keys.is_empty() {
            flush.end(true);
            return None;
        }
        Some(flush)
    }

    /// The next chunk as an operation; `None`: there is no more.
    pub(super) fn chunk(&mut self) -> Option<Box<dyn Operation>> {
        let count = self.keys.len().min(CHUNK);
        let keys: Vec<_> = self.keys.drain(..count).collect();
        let is_some = !keys.is_empty();
        is_some.then(|| -> Box<dyn Operation> {
            Box::new(Chunk::new(&self.table, &self.buffer, keys))
        })
    }

    /// Whether everything was carried.
    pub(super) fn end(self, is_complete: bool) {
        self.buffer.end_flush(self.since, is_complete);
    }
}

/// Some rows of a flush, as an operation of the writer.
pub(super) struct Chunk {
    table: Arc<Table>,
    buffer: Arc<dyn Buffer>,
    keys: Vec<Key>,
    /// Who wants to hear of it.
    caller: Option<oneshot::Sender<Answered<()>>>,
}

impl Chunk {
    fn new(table: &Arc<Table>, buffer: &Arc<dyn Buffer>, keys: Vec<Key>) -> Self {
        Self {
            table: Arc::clone(table),
            buffer: Arc::clone(buffer),
            keys,
            caller: None,
        }
    }

    /// As an operation that somebody waits for.
    pub(super) fn asked_for(
        table: &Arc<Table>,
        buffer: &Arc<dyn Buffer>,
        keys: Vec<Key>,
        caller: oneshot::Sender<Answered<()>>,
    ) -> Box<dyn Operation> {
        Box::new(Self {
            caller: Some(caller),
            ..Self::new(table, buffer, keys)
        })
    }

    /// Writes the rows that are still dirty.
    fn write(&self, batch: &mut Batch<'_>) -> Result<(), redb::Error> {
        let clock = batch.clock();
        let open = batch.table(&self.table)?;
        for key in &self.keys {
            let Some(row) = self.buffer.stage(key) else {
                continue;
            };
            // Not earlier: the clock may have been set back before the row was written.
            let now = clock.now().as_millis();
            let key = key.as_bytes();
            let before = open.read(key)?;
            match row {
                Flushed {
                    value: Some(value),
                    ttl,
                    expires_at,
                } if expires_at > now => open.write(key, &before, &value, ttl, expires_at, now)?,
                // Nothing has to be brought to the file to leave it again.
                _ => {
                    open.delete(key, &before)?;
                    // Nor may it come back from memory, should the clock be set back.
                    open.disown(key);
                }
            }
        }
        Ok(())
    }

    /// The transaction has ended.
    fn settle(&self, failure: Option<&Error>) {
        let cause = failure.map(|failure| match failure {
            Error::Unavailable { source, .. } => source.clone(),
            other => Cause::new(other.to_string()),
        });
        self.buffer.settle(&self.keys, cause.as_ref());
    }
}

impl Operation for Chunk {
    fn apply(&mut self, batch: &mut Batch<'_>) -> Result<(), redb::Error> {
        self.write(batch)
    }

    fn answer(self: Box<Self>, failure: Option<Error>) {
        self.settle(failure.as_ref());
        if let Some(caller) = self.caller {
            // A caller that no longer waits has taken its chance to know.
            let _ = caller.send(failure.map_or(Ok(Ok(())), Err));
        }
    }

    fn is_bulk(&self) -> bool {
        true
    }
}
