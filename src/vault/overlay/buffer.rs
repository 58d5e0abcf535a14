//! `Buffer`: how what is in memory comes to the file. It is what the writer knows of an overlay.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::Overlay;
use super::sync::{Ordering, lock};
use crate::error::Cause;
use crate::vault::codec;
use crate::vault::key::Key;
use crate::vault::row::Row;

/// How many dirty keys of a shard are collected before others get at it.
const COLLECTED_AT_ONCE: usize = 256;

/// What the writer does with an overlay, whatever its rows are.
pub(in crate::vault) trait Buffer: Send + Sync + fmt::Debug {
    /// The keys whose newest value is only in memory, in order.
    fn dirty_keys(&self) -> Vec<Key>;

    /// What the file should hold for `key`, if it is dirty: from here on it is in flight.
    fn stage(&self, key: &Key) -> Option<Flushed>;

    /// The transaction that carries these keys has ended; `failure`: without a commit.
    fn settle(&self, keys: &[Key], failure: Option<&Cause>);

    /// Whether the newest value of `key` is only in memory.
    fn is_pinned(&self, key: &Key) -> bool;

    /// The file no longer has these rows.
    fn forget(&self, keys: &[Key]);

    /// How long until the next flush is due; `None`: nothing is dirty.
    fn flush_in(&self) -> Option<Duration>;

    /// A flush begins: what becomes dirty from here on is for the next. Says since when something
    /// waits for it.
    fn begin_flush(&self) -> Since;

    /// The flush that began has ended; what it has not brought to the file is for the next.
    fn end_flush(&self, since: Since, is_complete: bool);

    /// No more updates but those that are queued.
    fn close(&self);

    fn health(&self) -> Health;

    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync>;
}

/// How well the file keeps up with the memory.
#[derive(Clone, Debug, Default)]
pub(in crate::vault) struct Health {
    pub(in crate::vault) oldest_unflushed: Option<Duration>,
    pub(in crate::vault) flushes: u64,
    pub(in crate::vault) rows_flushed: u64,
    pub(in crate::vault) last_flush_error: Option<Cause>,
}

/// A row on its way to the file.
pub(in crate::vault) struct Flushed {
    /// `None`: there is no row.
    pub(in crate::vault) value: Option<Vec<u8>>,
    pub(in crate::vault) ttl: u64,
    pub(in crate::vault) expires_at: u64,
}

/// An instant in ns since the overlay was made; 0: never.
pub(super) type Since = u64;

impl<V: Row> Buffer for Overlay<V> {
    fn dirty_keys(&self) -> Vec<Key> {
        // Whoever comes second must not find the lists that the first has taken empty.
        let _one_at_a_time = lock(&self.collecting);
        let mut keys = Vec::new();
        for guarded in &self.shards {
            let mut dirty = lock(&guarded.shard).take_dirty();
            dirty.sort_unstable();
            dirty.dedup();
            for positions in dirty.chunks(COLLECTED_AT_ONCE) {
                lock(&guarded.shard).keep_dirty(positions, &mut keys);
            }
        }
        keys.sort_unstable();
        keys
    }

    fn stage(&self, key: &Key) -> Option<Flushed> {
        let (hash, mut shard) = self.shard_of(key);
        let entry = shard.stage(hash, key)?;
        self.staged.fetch_add(1, Ordering::Relaxed);
        let value = entry.value.as_ref().map(codec::encode);
        let flushed = Flushed {
            value: None,
            ttl: entry.ttl,
            expires_at: entry.expires_at,
        };
        match value.transpose() {
            Ok(value) => Some(Flushed { value, ..flushed }),
            // What a closure leaves was encoded once to see, and a log always fits.
            Err(cause) => {
                let table = &self.place.table;
                tracing::error!(table, %key, %cause, "a row cannot be stored");
                None
            }
        }
    }

    fn settle(&self, keys: &[Key], failure: Option<&Cause>) {
        for key in keys {
            let (hash, mut shard) = self.shard_of(key);
            shard.settle(hash, key, failure.is_none());
            // Rows may have grown since they came in.
            shard.shrink_to(self.share);
        }
        *lock(&self.last_flush_error) = failure.cloned();
        let rows = self.staged.swap(0, Ordering::Relaxed);
        if failure.is_none() {
            self.rows_flushed.fetch_add(rows, Ordering::Relaxed);
        }
    }

    fn is_pinned(&self, key: &Key) -> bool {
        let (hash, shard) = self.shard_of(key);
        shard.is_pinned(hash, key)
    }

    fn forget(&self, keys: &[Key]) {
        for key in keys {
            let hash = self.hash(key);
            let guarded = self.guarded(hash);
            lock(&guarded.shard).forget(hash, key);
            // Whoever waited for a load that was taken back has to look again.
            guarded.loaded.notify_all();
        }
    }

    fn flush_in(&self) -> Option<Duration> {
        match self.dirty_since.load(Ordering::Relaxed) {
            0 => None,
            _ if self.urgent.load(Ordering::Relaxed) => Some(Duration::ZERO),
            since => {
                let due = Duration::from_nanos(since).saturating_add(self.flush_every);
                Some(due.saturating_sub(self.born.elapsed()))
            }
        }
    }

    fn begin_flush(&self) -> Since {
        let mut flushing = lock(&self.flushing_since);
        let since = self.dirty_since.swap(0, Ordering::Relaxed);
        self.urgent.store(false, Ordering::Relaxed);
        flushing.push(since);
        since
    }

    fn end_flush(&self, since: Since, is_complete: bool) {
        let mut flushing = lock(&self.flushing_since);
        if let Some(position) = flushing.iter().position(|other| *other == since) {
            flushing.swap_remove(position);
        }
        if is_complete && since != 0 {
            self.flushes.fetch_add(1, Ordering::Relaxed);
        }
        if !is_complete {
            // Another flush may have taken the time, but not all of the rows.
            let since = if since == 0 { self.elapsed() } else { since };
            let earlier = |other| Some(if other == 0 { since } else { since.min(other) });
            let order = Ordering::Relaxed;
            let _ = self.dirty_since.fetch_update(order, order, earlier);
            self.place.queue.wake();
        }
    }

    fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    fn health(&self) -> Health {
        let flushing = lock(&self.flushing_since);
        let dirty = self.dirty_since.load(Ordering::Relaxed);
        let since = flushing.iter().copied().chain([dirty]);
        let oldest = since.filter(|since| *since != 0).min();
        let age = |since| {
            self.born
                .elapsed()
                .saturating_sub(Duration::from_nanos(since))
        };
        Health {
            oldest_unflushed: oldest.map(age),
            flushes: self.flushes.load(Ordering::Relaxed),
            rows_flushed: self.rows_flushed.load(Ordering::Relaxed),
            last_flush_error: lock(&self.last_flush_error).clone(),
        }
    }

    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}
