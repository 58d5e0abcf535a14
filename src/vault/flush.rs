//! The flush: what changed in memory goes to the file, in chunks.
//!
//! Operations of other tables of the file wait for one chunk at most.

use std::sync::Arc;

use super::answer::Answered;
use super::batch::Batch;
use super::operation::Operation;
use super::overlay::{Buffer, Dirty, DirtyRows, Since, Staging};
use super::table::Table;
use crate::error::{Cause, Error};

/// How many rows one transaction carries.
pub(super) const CHUNK: usize = 10_000;

/// How many of them are copied from memory at once.
const STAGED_AT_ONCE: usize = 256;

/// A flush under way: the rows that are still to go, in the order of their keys.
#[derive(Debug)]
pub(super) struct Flush {
    table: Arc<Table>,
    buffer: Arc<dyn Buffer>,
    since: Since,
    rows: DirtyRows,
}

impl Flush {
    /// A flush of everything that is dirty in `table`; `None`: nothing is.
    pub(super) fn begin(table: &Arc<Table>) -> Option<Self> {
        let buffer = table.buffer.as_ref()?;
        let mut flush = Self {
            table: Arc::clone(table),
            buffer: Arc::clone(buffer),
            since: buffer.begin_flush(),
            rows: buffer.dirty(),
        };
        if !flush.has_more() {
            flush.end(true);
            return None;
        }
        Some(flush)
    }

    /// Whether there are rows to go. Lists the next if there are none in the list.
    fn has_more(&mut self) -> bool {
        while self.rows.is_empty() && !self.rows.are_all_listed() {
            self.buffer.list(&mut self.rows);
        }
        !self.rows.is_empty()
    }

    /// The rows of the next chunk.
    fn rows(&mut self) -> Option<Vec<Dirty>> {
        let has_more = self.has_more();
        has_more.then(|| self.rows.by_ref().take(CHUNK).collect())
    }

    /// The next chunk as an operation; `None`: there is no more.
    pub(super) fn chunk(&mut self) -> Option<Box<dyn Operation>> {
        let rows = self.rows()?;
        Some(Box::new(Chunk::new(&self.table, &self.buffer, rows)))
    }

    /// As `chunk`, of an operation that somebody waits for.
    pub(super) fn chunk_asked_for(
        &mut self,
    ) -> Option<impl FnOnce(oneshot::Sender<Answered<()>>) -> Box<dyn Operation> + use<>> {
        let rows = self.rows()?;
        let chunk = Chunk::new(&self.table, &self.buffer, rows);
        Some(|caller| -> Box<dyn Operation> {
            Box::new(Chunk {
                caller: Some(caller),
                ..chunk
            })
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
    rows: Vec<Dirty>,
    /// Who wants to hear of it.
    caller: Option<oneshot::Sender<Answered<()>>>,
}

impl Chunk {
    fn new(table: &Arc<Table>, buffer: &Arc<dyn Buffer>, rows: Vec<Dirty>) -> Self {
        Self {
            table: Arc::clone(table),
            buffer: Arc::clone(buffer),
            rows,
            caller: None,
        }
    }

    /// Writes the rows that are still dirty.
    fn write(&self, batch: &mut Batch<'_>) -> Result<(), redb::Error> {
        let clock = batch.clock();
        let open = batch.table(&self.table)?;
        let mut staging = Staging::default();
        for rows in self.rows.chunks(STAGED_AT_ONCE) {
            self.buffer.stage(rows, &mut staging);
            // Not earlier: the clock may have been set back before a row was written.
            let now = clock.now().as_millis();
            for (place, row) in rows.iter().enumerate() {
                let Some((flushed, value)) = staging.get(place) else {
                    continue;
                };
                let key = row.key.as_bytes();
                let before = open.find(key)?;
                let (ttl, expires_at) = (flushed.ttl, flushed.expires_at);
                match value {
                    Some(value) if expires_at > now => {
                        open.write(key, &before, value, ttl, expires_at, now)?;
                    }
                    // Nothing has to be brought to the file to leave it again.
                    _ => {
                        open.delete(key, &before)?;
                        // Nor may it come back from memory, should the clock be set back.
                        open.disown(key);
                    }
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
        self.buffer.settle(&self.rows, cause.as_ref());
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
