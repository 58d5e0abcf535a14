//! `Buffer`: how what is in memory comes to the file. It is what the writer knows of an overlay.

use std::any::Any;
use std::cmp;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::Overlay;
use super::shard::Shard;
use super::sync::{MutexGuard, Ordering, lock};
use crate::error::Cause;
use crate::vault::codec;
use crate::vault::key::Key;
use crate::vault::row::Row;

/// How many entries of a shard are looked at before others get at it. Whoever waits for its lock spins
/// for about as long as that takes, and need not sleep.
const LOOKED_AT_ONCE: usize = 8;

/// What the writer does with an overlay, whatever its rows are.
pub(in crate::vault) trait Buffer: Send + Sync + fmt::Debug {
    /// The rows whose newest value is only in memory, to be listed.
    fn dirty(&self) -> DirtyRows;

    /// Lists the next of the rows, at most 2^18.
    fn list(&self, rows: &mut DirtyRows);

    /// Brings what the file should hold for those of the rows that are dirty: from here on they are
    /// in flight.
    fn stage(&self, rows: &[Dirty], staging: &mut Staging);

    /// The transaction that carries these rows has ended; `failure`: without a commit.
    fn settle(&self, rows: &[Dirty], failure: Option<&Cause>);

    /// Whether the newest value of `key` is only in memory.
    fn is_pinned(&self, key: &Key) -> bool;

    /// The file no longer has these rows.
    fn are_gone(&self, keys: &[Key]);

    /// The file has other rows of these keys than the memory knows of, or may have.
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

/// A row whose newest value is only in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::vault) struct Dirty {
    pub(in crate::vault) key: Key,
    /// Where it is, unless another has come there since: then it is in the file.
    shard: u32,
    position: u32,
}

impl PartialOrd for Dirty {
    fn partial_cmp(&self, other: &Self) -> Option<cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// By key.
impl Ord for Dirty {
    fn cmp(&self, other: &Self) -> cmp::Ordering {
        let place = |row: &Self| (row.shard, row.position);
        let by_key = self.key.cmp(&other.key);
        by_key.then_with(|| place(self).cmp(&place(other)))
    }
}

/// Rows, a part of which is listed: yields those in the order of their keys.
#[derive(Debug, Default)]
pub(in crate::vault) struct DirtyRows {
    /// Those not listed yet: the shard, and where in it they are.
    unlisted: Vec<(u32, Vec<u32>)>,
    /// Lists in order, to be merged.
    listed: BinaryHeap<Rows>,
}

/// Some rows of a shard.
#[derive(Debug)]
struct Rows {
    next: Dirty,
    later: std::vec::IntoIter<Dirty>,
}

impl DirtyRows {
    /// Whether none is left that is listed.
    pub(in crate::vault) fn is_empty(&self) -> bool {
        self.listed.is_empty()
    }

    pub(in crate::vault) fn are_all_listed(&self) -> bool {
        self.unlisted.is_empty()
    }

    fn add(&mut self, mut rows: Vec<Dirty>) {
        rows.sort_unstable();
        let mut later = rows.into_iter();
        if let Some(next) = later.next() {
            self.listed.push(Rows { next, later });
        }
    }
}

impl Iterator for DirtyRows {
    type Item = Dirty;

    fn next(&mut self) -> Option<Dirty> {
        let mut first = self.listed.peek_mut()?;
        match first.later.next() {
            Some(next) => Some(std::mem::replace(&mut first.next, next)),
            None => Some(PeekMut::pop(first).next),
        }
    }
}

/// The heap has the greatest at its top: who is next comes after the others.
impl Ord for Rows {
    fn cmp(&self, other: &Self) -> cmp::Ordering {
        other.next.cmp(&self.next)
    }
}

impl PartialOrd for Rows {
    fn partial_cmp(&self, other: &Self) -> Option<cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Rows {
    fn eq(&self, other: &Self) -> bool {
        self.next == other.next
    }
}

impl Eq for Rows {}

/// Rows on their way to the file. One serves for many batches, so that its memory is asked for once.
#[derive(Debug, Default)]
pub(in crate::vault) struct Staging {
    /// Of each row that was asked for.
    rows: Vec<Option<Flushed>>,
    /// Their values.
    bytes: Vec<u8>,
}

/// A row on its way to the file.
#[derive(Clone, Debug)]
pub(in crate::vault) struct Flushed {
    /// Where its bytes are; `None`: there is no row.
    value: Option<Range<usize>>,
    pub(in crate::vault) ttl: u64,
    pub(in crate::vault) expires_at: u64,
}

impl Staging {
    /// What the file should hold for the row at this place of what was asked for, if it is dirty:
    /// its value, if there is one.
    pub(in crate::vault) fn get(&self, place: usize) -> Option<(&Flushed, Option<&[u8]>)> {
        let row = self.rows.get(place)?.as_ref()?;
        let value = row.value.clone().and_then(|range| self.bytes.get(range));
        Some((row, value))
    }

    /// A place, and the values.
    fn at(&mut self, place: usize) -> (Option<&mut Option<Flushed>>, &mut Vec<u8>) {
        (self.rows.get_mut(place), &mut self.bytes)
    }

    /// Makes room for so many rows.
    fn begin(&mut self, count: usize) {
        self.rows.clear();
        self.rows.resize(count, None);
        self.bytes.clear();
    }
}

/// How many rows are listed at once: the list of a million would take more memory than it is
/// worth to write each page of the file once only.
const LISTED_AT_ONCE: usize = 1 << 17;

/// How many rows of a shard are listed together: an allocator that has seen large lists go keeps the
/// room of others like them.
const LISTED_TOGETHER: usize = 2_048;

/// How many times as long as a flush took the writer rests after it: it takes a third of a processor
/// at most, and of the disk's time.
const REST: u32 = 2;

/// How long the writer rests at most.
const LONGEST_REST: Duration = Duration::from_secs(5);

/// A flush under way. Instants are in ns since the overlay was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::vault) struct Since {
    /// Since when something waits for it; 0: nothing does.
    pub(super) dirty: u64,
    began: u64,
}

impl<V: Row> Buffer for Overlay<V> {
    fn dirty(&self) -> DirtyRows {
        // Whoever comes second must not find the lists that the first has taken empty.
        let _one_at_a_time = lock(&self.collecting);
        let mut rows = DirtyRows::default();
        for (number, guarded) in (0..).zip(&self.shards) {
            let mut dirty = lock(&guarded.shard).take_dirty();
            dirty.sort_unstable();
            dirty.dedup();
            let mut kept = Vec::with_capacity(dirty.len());
            for positions in dirty.chunks(LOOKED_AT_ONCE) {
                let mut shard = lock(&guarded.shard);
                // Known under the lock only: what a later transaction carries looks like what an
                // earlier one has carried.
                shard.keep_dirty(positions, self.transaction(), &mut kept);
            }
            if !kept.is_empty() {
                rows.unlisted.push((number, kept));
            }
        }
        rows
    }

    fn list(&self, rows: &mut DirtyRows) {
        let most = (LISTED_AT_ONCE / self.shards.len()).max(1);
        let unlisted = std::mem::take(&mut rows.unlisted);
        for (number, mut positions) in unlisted {
            let next = positions.split_off(positions.len().saturating_sub(most));
            for positions in next.chunks(LISTED_TOGETHER) {
                let mut list = Vec::with_capacity(positions.len());
                for positions in positions.chunks(LOOKED_AT_ONCE) {
                    let Some(shard) = self.shard_at(number) else {
                        return;
                    };
                    let transaction = self.transaction();
                    for position in positions {
                        let key = shard.dirty_key(*position, transaction).cloned();
                        list.extend(key.map(|key| Dirty {
                            key,
                            shard: number,
                            position: *position,
                        }));
                    }
                }
                rows.add(list);
            }
            if !positions.is_empty() {
                rows.unlisted.push((number, positions));
            }
        }
    }

    fn stage(&self, rows: &[Dirty], staging: &mut Staging) {
        staging.begin(rows.len());
        let transaction = self.transaction();
        let mut order: Vec<_> = rows.iter().enumerate().collect();
        order.sort_unstable_by_key(|(_, row)| row.shard);
        for of_shard in order.chunk_by(|(_, one), (_, other)| one.shard == other.shard) {
            for rows in of_shard.chunks(LOOKED_AT_ONCE) {
                self.stage_some(rows, transaction, staging);
            }
        }
        let staged = staging.rows.iter().flatten().count();
        self.staged.fetch_add(staged as u64, Ordering::Relaxed);
    }

    fn settle(&self, rows: &[Dirty], failure: Option<&Cause>) {
        if failure.is_none() {
            self.transaction.fetch_add(1, Ordering::Release);
        } else {
            for row in rows {
                if let Some(mut shard) = self.shard_at(row.shard) {
                    shard.unstage(row.position, &row.key);
                }
            }
        }
        for guarded in &self.shards {
            // Rows may have grown since they came in.
            self.shrink(&mut lock(&guarded.shard));
        }
        *lock(&self.last_flush_error) = failure.cloned();
        let rows = self.staged.swap(0, Ordering::Relaxed);
        if failure.is_none() {
            self.rows_flushed.fetch_add(rows, Ordering::Relaxed);
        }
    }

    fn is_pinned(&self, key: &Key) -> bool {
        let (hash, shard) = self.shard_of(key);
        shard.is_pinned(hash, key, self.transaction())
    }

    fn are_gone(&self, keys: &[Key]) {
        let transaction = self.transaction();
        self.take_back(keys, |shard, hash, key| shard.gone(hash, key, transaction));
    }

    fn forget(&self, keys: &[Key]) {
        let transaction = self.transaction();
        self.take_back(keys, |shard, hash, key| {
            shard.forget(hash, key, transaction)
        });
    }

    fn flush_in(&self) -> Option<Duration> {
        match self.dirty_since.load(Ordering::Relaxed) {
            0 => None,
            _ if self.urgent.load(Ordering::Relaxed) => Some(Duration::ZERO),
            since => {
                let due = Duration::from_nanos(since).saturating_add(self.flush_every);
                let rested = Duration::from_nanos(self.rest_until.load(Ordering::Relaxed));
                Some(due.max(rested).saturating_sub(self.born.elapsed()))
            }
        }
    }

    fn begin_flush(&self) -> Since {
        let mut flushing = lock(&self.flushing_since);
        let since = Since {
            dirty: self.dirty_since.swap(0, Ordering::Relaxed),
            began: self.elapsed(),
        };
        self.urgent.store(false, Ordering::Relaxed);
        flushing.push(since);
        since
    }

    fn end_flush(&self, since: Since, is_complete: bool) {
        let mut flushing = lock(&self.flushing_since);
        if let Some(position) = flushing.iter().position(|other| *other == since) {
            flushing.swap_remove(position);
        }
        // Whoever flushes all of the time leaves the processor and the disk to nobody else.
        let now = self.elapsed();
        let rest = if is_complete {
            let took = Duration::from_nanos(now.saturating_sub(since.began));
            took.saturating_mul(REST).min(LONGEST_REST)
        } else {
            Duration::ZERO
        };
        let rested = Duration::from_nanos(now).saturating_add(rest);
        let rested = u64::try_from(rested.as_nanos()).unwrap_or(u64::MAX);
        self.rest_until.store(rested, Ordering::Relaxed);
        let since = since.dirty;
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
        let since = flushing.iter().map(|since| since.dirty).chain([dirty]);
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

impl<V: Row> Overlay<V> {
    /// Has each key's shard take something back.
    fn take_back(&self, keys: &[Key], from: impl Fn(&mut Shard<V>, u64, &Key)) {
        for key in keys {
            let hash = self.hash(key);
            let guarded = self.guarded(hash);
            from(&mut lock(&guarded.shard), hash, key);
            // Whoever waited for a load that was taken back has to look again.
            guarded.loaded.notify_all();
        }
    }

    /// Stages rows of one shard, each with its place in the staging.
    fn stage_some(&self, rows: &[(usize, &Dirty)], transaction: u32, staging: &mut Staging) {
        let Some(mut shard) = rows.first().and_then(|(_, row)| self.shard_at(row.shard)) else {
            return;
        };
        let mut copies = Vec::new();
        for (place, row) in rows {
            let Some(entry) = shard.stage(row.position, &row.key, transaction) else {
                continue;
            };
            let lives = (entry.ttl, entry.expires_at);
            match entry.value.as_ref().and_then(Row::copy) {
                Some(copy) => copies.push((place, &row.key, copy, lives)),
                None => self.encode(staging.at(*place), &row.key, entry.value.as_ref(), lives),
            }
        }
        drop(shard);
        for (place, key, copy, lives) in copies {
            self.encode(staging.at(*place), key, Some(&copy), lives);
        }
    }

    fn shard_at(&self, number: u32) -> Option<MutexGuard<'_, Shard<V>>> {
        let guarded = self.shards.get(number as usize)?;
        Some(lock(&guarded.shard))
    }

    /// Puts what the file should hold for `key` into a place of the staging.
    fn encode(
        &self,
        (place, bytes): (Option<&mut Option<Flushed>>, &mut Vec<u8>),
        key: &Key,
        value: Option<&V>,
        (ttl, expires_at): (u64, u64),
    ) {
        let start = bytes.len();
        let encoded = value.map(|value| {
            codec::encode_into(value, bytes)?;
            Ok::<_, Cause>(start..bytes.len())
        });
        match encoded.transpose() {
            Ok(value) => {
                if let Some(place) = place {
                    *place = Some(Flushed {
                        value,
                        ttl,
                        expires_at,
                    });
                }
            }
            // What a closure leaves was encoded once to see, and a log always fits.
            Err(cause) => {
                let table = &self.place.table;
                tracing::error!(table, %key, %cause, "a row cannot be stored");
            }
        }
    }
}

#[cfg(not(shuttle))]
#[cfg(test)]
mod tests {
    use std::time::Instant;

    use serde::{Deserialize, Serialize};

    use super::super::Place;
    use super::*;
    use crate::clock::SystemClock;

    #[derive(Debug, Serialize, Deserialize)]
    struct Nothing;

    impl Row for Nothing {
        const KIND: &'static str = "nothing/1";
    }

    /// How long the writer rests after a flush that took so many seconds, at least and at most.
    fn rest_after(seconds: u64, is_complete: bool) -> [Duration; 2] {
        let place = Place {
            path: std::path::Path::new("f").into(),
            table: "t".into(),
            clock: Arc::new(SystemClock),
            queue: Arc::default(),
        };
        let mut overlay = Overlay::<Nothing>::new(place, Duration::from_millis(1), 0);
        let born = Instant::now().checked_sub(Duration::from_secs(100));
        overlay.born = born.expect("a machine that runs for longer");
        let began = overlay.elapsed() - seconds * 1_000_000_000;
        let before = overlay.elapsed();
        overlay.end_flush(Since { dirty: 1, began }, is_complete);
        let until = overlay.rest_until.load(Ordering::Relaxed);
        // From some moment between the two on.
        let since = [overlay.elapsed(), before];
        since.map(|since| Duration::from_nanos(until.saturating_sub(since)))
    }

    #[test]
    fn the_writer_rests_for_longer_than_a_flush_took_but_not_for_ever() {
        let [least, most] = rest_after(1, true);
        assert!(most >= Duration::from_secs(REST.into()) && least < LONGEST_REST);
        let [least, most] = rest_after(60, true);
        assert!(least <= LONGEST_REST && LONGEST_REST <= most);
        // What failed is tried again when the disk is well.
        assert_eq!(rest_after(60, false)[0], Duration::ZERO);
    }
}
