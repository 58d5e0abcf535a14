//! The overlay: rows in memory in front of a table, for [`Durability::Buffered`].
//!
//! A check is decided here; the writer carries what changed to the file once per interval.
//!
//! Invariant: the newest value of a key is here if its entry is dirty or in flight, else in the
//! latest commit. So whoever wants it looks here first and begins the read transaction last, and an
//! entry may leave the memory only after the commit that carries it.
//!
//! A key that is not here is loaded: a mark is left, the file is read without the lock, and what was
//! read is installed only if the mark is still there. Whoever else wants the key waits for that.
//!
//! Lock order: one shard at a time, and nothing is locked under it but the queue, to wake the writer.
//! A caller's closure runs under its key's lock. No lock poisons: closures are caught.
//!
//! [`Durability::Buffered`]: super::Durability::Buffered

mod buffer;
mod pace;
mod shard;
mod sync;
#[cfg(all(test, shuttle))]
mod tests;

pub(super) use buffer::{Buffer, Dirty, DirtyRows, Since, Staging};

use std::fmt;
use std::hash::BuildHasher;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use foldhash::quality::RandomState;

use self::pace::Pace;
use self::shard::{Entry, Shard};
use self::sync::{
    AtomicBool, AtomicU32, AtomicU64, Condvar, Mutex, MutexGuard, Ordering, lock, wait,
};
use super::answer::Answered;
use super::codec;
use super::key::{Key, KeyParts, corrupt_row};
use super::queue::Queue;
use super::row::Row;
use super::slot::{self, IfDamaged, Slot, ttl_ms};
use super::table::Stored;
use super::writer;
use crate::clock::{Clock, Timestamp};
use crate::error::{Applied, Cause, Error, Result};

/// How many shards there are for each processor. Fewer are closer together in its caches.
const SHARDS_PER_PROCESSOR: usize = 16;

/// Rows of a table in memory.
pub(super) struct Overlay<V> {
    shards: Box<[Guarded<V>]>,
    hasher: RandomState,
    /// How many bytes a shard may hold.
    share: usize,
    flush_every: Duration,
    place: Place,
    pace: Pace,
    closed: AtomicBool,
    /// Since when something is dirty that no flush has taken.
    dirty_since: AtomicU64,
    /// The flushes under way.
    flushing_since: Mutex<Vec<Since>>,
    /// Until when no other begins by itself, in ns since it was born.
    rest_until: AtomicU64,
    born: Instant,
    /// Held while dirty keys are collected.
    collecting: Mutex<()>,
    /// There is no room: the next flush is due at once.
    urgent: AtomicBool,
    flushes: AtomicU64,
    rows_flushed: AtomicU64,
    /// Rows in the transaction under way.
    staged: AtomicU64,
    /// Its number; those before it are committed.
    transaction: AtomicU32,
    last_flush_error: Mutex<Option<Cause>>,
}

/// Where an overlay belongs.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) path: Arc<Path>,
    pub(super) table: String,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) queue: Arc<Queue>,
}

/// A shard on cache lines of its own.
#[repr(align(128))]
struct Guarded<V> {
    shard: Mutex<Shard<V>>,
    /// A load has ended.
    loaded: Condvar,
}

/// What a caller does about a key that is not in memory, or has no room there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Patience {
    /// It goes elsewhere.
    None,
    /// It reads the file, and waits for others who do; without room it goes elsewhere.
    Read,
    /// As `Read`, and takes room that is not there: it is the writer, which flushes next.
    Writer,
}

/// A change of a value in its place, under the lock of its row: quick, and not a closure, so that it
/// is part of the code around it.
pub(crate) trait Change<V> {
    type Answer;

    /// Changes the value, and says for how long it is to live from now; `None`: as long as before.
    ///
    /// Must not panic, and must not use a vault.
    fn apply(self, value: &mut V, now: Timestamp) -> (Self::Answer, Option<Duration>);
}

/// What came of an update: an answer, or the closure back, as it has to go elsewhere.
pub(super) enum Attempt<F, R> {
    Done(Answered<R>),
    Elsewhere(F),
}

impl<V: Row> Overlay<V> {
    pub(super) fn new(place: Place, flush_every: Duration, bytes: usize) -> Self {
        let guarded = || Guarded {
            shard: Mutex::new(Shard::default()),
            loaded: Condvar::new(),
        };
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let count = (processors * SHARDS_PER_PROCESSOR).next_power_of_two();
        Self {
            shards: std::iter::repeat_with(guarded).take(count).collect(),
            hasher: RandomState::default(),
            share: bytes / count,
            flush_every,
            pace: Pace::new(&*place.clock),
            place,
            closed: AtomicBool::new(false),
            dirty_since: AtomicU64::new(0),
            flushing_since: Mutex::new(Vec::new()),
            rest_until: AtomicU64::new(0),
            born: Instant::now(),
            collecting: Mutex::new(()),
            urgent: AtomicBool::new(false),
            flushes: AtomicU64::new(0),
            rows_flushed: AtomicU64::new(0),
            staged: AtomicU64::new(0),
            transaction: AtomicU32::new(0),
            last_flush_error: Mutex::new(None),
        }
    }

    fn hash(&self, key: &Key) -> u64 {
        self.hasher.hash_one(key.parts())
    }

    /// The index of a shard uses a hash's first and last bits, so the shard is chosen by others.
    fn guarded(&self, hash: u64) -> &Guarded<V> {
        let number = usize::try_from(hash >> 32).unwrap_or(0) & (self.shards.len() - 1);
        #[expect(clippy::indexing_slicing, reason = "their number is a power of two")]
        &self.shards[number]
    }

    /// Runs `f` on the row of `key` under its lock.
    pub(super) fn update<R, F>(
        &self,
        key: &Key,
        if_damaged: IfDamaged,
        patience: Patience,
        load: impl Fn(&Key) -> Result<Stored>,
        f: F,
    ) -> Attempt<F, R>
    where
        F: FnOnce(&mut Slot<V>) -> R,
    {
        let hash = self.hash(key);
        let guarded = self.guarded(hash);
        let mut shard = lock(&guarded.shard);
        let mut found_damage = false;
        loop {
            if patience != Patience::Writer && self.closed.load(Ordering::Acquire) {
                return Attempt::Done(Err(self.is_closed()));
            }
            match shard.find(hash, key) {
                Some(position) if !shard.get(position).is_some_and(Entry::is_loading) => {
                    return Attempt::Done(self.run(&mut shard, position, key, found_damage, f));
                }
                _ if patience == Patience::None => return Attempt::Elsewhere(f),
                Some(_) => shard = wait(&guarded.loaded, shard),
                None => {
                    if !self.shrink(&mut shard) {
                        self.urgent.store(true, Ordering::Relaxed);
                        if let Some(cause) = lock(&self.last_flush_error).clone() {
                            return Attempt::Done(Err(self.is_full(cause)));
                        }
                        if patience != Patience::Writer {
                            return Attempt::Elsewhere(f);
                        }
                    }
                    let mark = Mark::leave(guarded, &mut shard, hash, key);
                    drop(shard);
                    let load = || load(key).and_then(|row| self.decode(key, &row, if_damaged));
                    // The row's own deserialization is the caller's code.
                    shard = match catch_unwind(AssertUnwindSafe(load)) {
                        Err(panic) => return Attempt::Done(Ok(Err(panic))),
                        Ok(Ok(row)) => {
                            found_damage = row.damaged;
                            mark.replace(row)
                        }
                        Ok(Err(error)) => return Attempt::Done(Err(error)),
                    };
                }
            }
        }
    }

    /// Makes a change in its place, if the row of `key` is in memory.
    #[inline(always)]
    pub(super) fn change<C: Change<V>>(&self, key: KeyParts<'_>, change: C) -> Option<C::Answer>
    where
        V: Default,
    {
        let hash = self.hasher.hash_one(key);
        let mut shard = lock(&self.guarded(hash).shard);
        if self.closed.load(Ordering::Acquire) {
            return None;
        }
        let position = shard.find_by(hash, |other| key.are(other))?;
        let now = self.now(&mut shard);
        let entry = shard
            .get_mut(position)
            .filter(|entry| !entry.is_loading())?;
        let before = entry.value.as_ref().map_or(0, Row::memory);
        if entry.expires_at <= now.as_millis() {
            entry.value = None;
        }
        let had_value = entry.value.is_some();
        let value = entry.value.get_or_insert_default();
        let (result, ttl) = change.apply(value, now);
        match ttl {
            Some(ttl) => {
                entry.ttl = ttl_ms(ttl);
                entry.expires_at = now.as_millis().saturating_add(entry.ttl);
            }
            None if had_value => {}
            None => entry.value = None,
        }
        let after = entry.value.as_ref().map_or(0, Row::memory);
        entry.recent = true;
        self.changed(&mut shard, position, ttl.is_some(), before, after);
        Some(result)
    }

    /// Takes note of what became of an entry, whose value held so many bytes elsewhere.
    #[inline(always)]
    fn changed(
        &self,
        shard: &mut Shard<V>,
        position: u32,
        is_dirty: bool,
        before: usize,
        after: usize,
    ) {
        if is_dirty && shard.mark_dirty(position) {
            self.note_dirty();
        }
        if before != after {
            self.resized(shard, before, after);
        }
    }

    #[inline(never)]
    fn resized(&self, shard: &mut Shard<V>, before: usize, after: usize) {
        shard.resized(before, after);
        // A row has grown: others make room, else the next flush is due at once.
        if before < after && !self.shrink(shard) && !self.urgent.swap(true, Ordering::Relaxed) {
            self.place.queue.wake();
        }
    }

    /// What a row of the file is in memory.
    fn decode(&self, key: &Key, stored: &Stored, if_damaged: IfDamaged) -> Result<Loaded<V>> {
        let damaged = || corrupt_row(&self.place.table, key.as_bytes());
        match stored {
            Stored::Missing => Ok(Loaded::default()),
            Stored::Damaged(_) if if_damaged == IfDamaged::Refuse => Err(damaged()),
            Stored::Damaged(_) => Ok(Loaded {
                damaged: true,
                ..Loaded::default()
            }),
            Stored::Whole(header, bytes) => match codec::decode(bytes) {
                Some(value) => Ok(Loaded {
                    value: Some(value),
                    expires_at: header.expires_at,
                    ttl: header.ttl,
                    damaged: false,
                }),
                None if header.has_expired(self.place.clock.now().as_millis()) => {
                    Ok(Loaded::default())
                }
                None if if_damaged == IfDamaged::Refuse => Err(damaged()),
                None => Ok(Loaded {
                    damaged: true,
                    ..Loaded::default()
                }),
            },
        }
    }

    /// Runs `f` on an entry, and takes over what it leaves.
    fn run<R>(
        &self,
        shard: &mut Shard<V>,
        position: u32,
        key: &Key,
        found_damage: bool,
        f: impl FnOnce(&mut Slot<V>) -> R,
    ) -> Answered<R> {
        let now = self.now(shard);
        let Some(entry) = shard.get_mut(position) else {
            return Err(corrupt_row(&self.place.table, key.as_bytes()));
        };
        let entry_hash = entry.hash();
        let before = entry.value.as_ref().map_or(0, Row::memory);
        let is_live = entry.expires_at > now.as_millis();
        let live = entry.value.take_if(|_| is_live);
        let expires_at = Timestamp::from_millis(entry.expires_at);
        let mut slot = Slot::in_memory(live, expires_at, now, found_damage);
        // The row's own serialization is the caller's code, too.
        let run = || {
            let result = f(&mut slot);
            let change = slot.checked_change(&self.place.table, key)?;
            Ok((result, change))
        };
        let ran = writer::without_vaults(|| catch_unwind(AssertUnwindSafe(run)));
        let (answered, change) = match ran {
            Ok(Ok((result, change))) => (Ok(Ok(result)), change),
            Ok(Err(error)) => (Err(error), slot::Change::Keep),
            Err(panic) => (Ok(Err(panic)), slot::Change::Keep),
        };
        let is_changed = match change {
            slot::Change::Put { ttl } => {
                entry.ttl = ttl_ms(ttl);
                entry.expires_at = now.as_millis().saturating_add(entry.ttl);
                entry.value = slot.into_value();
                true
            }
            slot::Change::Remove => {
                entry.value = None;
                true
            }
            // An expired row stays where it was.
            slot::Change::Keep => {
                if is_live {
                    entry.value = slot.into_original();
                }
                false
            }
        };
        let after = entry.value.as_ref().map_or(0, Row::memory);
        shard.touch(position);
        self.changed(shard, position, is_changed, before, after);
        if found_damage && !is_changed {
            // It is still damaged, and not to be taken for a row that is not there.
            shard.forget(entry_hash, key, self.transaction());
        }
        answered
    }

    /// The first dirty row since the last flush began sets the time of the next.
    #[inline(never)]
    fn note_dirty(&self) {
        if self.dirty_since.load(Ordering::Relaxed) == 0 {
            let since = self.dirty_since.compare_exchange(
                0,
                self.elapsed(),
                Ordering::Relaxed,
                Ordering::Relaxed,
            );
            if since.is_ok() {
                self.place.queue.wake();
            }
        }
    }

    /// ns since it was born, at least 1.
    fn elapsed(&self) -> u64 {
        u64::try_from(self.born.elapsed().as_nanos())
            .unwrap_or(u64::MAX)
            .max(1)
    }

    /// What `f` makes of the row of `key` and the time, if the row is in memory.
    pub(super) fn look<T, F>(&self, key: &Key, f: F) -> std::result::Result<Result<T>, F>
    where
        F: FnOnce(Option<&V>, Timestamp) -> T,
    {
        if self.closed.load(Ordering::Acquire) {
            return Ok(Err(self.is_closed()));
        }
        let hash = self.hash(key);
        let shard = lock(&self.guarded(hash).shard);
        let entry = shard.find(hash, key);
        let entry = entry.and_then(|position| shard.get(position));
        match entry {
            Some(entry) if !entry.is_loading() => {
                let now = self.place.clock.now();
                let is_live = entry.expires_at > now.as_millis();
                Ok(Ok(f(entry.value.as_ref().filter(|_| is_live), now)))
            }
            _ => Err(f),
        }
    }

    fn now(&self, shard: &mut Shard<V>) -> Timestamp {
        self.pace.now(&mut shard.reading, &*self.place.clock)
    }

    /// There is no room, and the last flush has failed.
    fn is_full(&self, source: Cause) -> Error {
        Error::Unavailable {
            path: self.place.path.to_path_buf(),
            applied: Applied::No,
            source,
        }
    }

    fn is_closed(&self) -> Error {
        Error::Closed {
            path: self.place.path.to_path_buf(),
        }
    }

    /// Brings a shard back to its share, if what may go is enough for that.
    fn shrink(&self, shard: &mut Shard<V>) -> bool {
        shard.shrink_to(self.share, self.transaction())
    }

    /// What it carries is not on disk yet. What those before it carried is, for whoever reads the
    /// file from now on.
    fn transaction(&self) -> u32 {
        self.transaction.load(Ordering::Acquire)
    }

    fn shard_of(&self, key: &Key) -> (u64, MutexGuard<'_, Shard<V>>) {
        let hash = self.hash(key);
        (hash, lock(&self.guarded(hash).shard))
    }
}

impl<V> fmt::Debug for Overlay<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Overlay")
            .field("flush_every", &self.flush_every)
            .field("share", &self.share)
            .finish_non_exhaustive()
    }
}

/// A row as it is installed.
struct Loaded<V> {
    value: Option<V>,
    expires_at: u64,
    ttl: u64,
    damaged: bool,
}

impl<V> Default for Loaded<V> {
    fn default() -> Self {
        Self {
            value: None,
            expires_at: 0,
            ttl: 0,
            damaged: false,
        }
    }
}

/// The mark of a load under way. Dropped, it is taken back.
struct Mark<'o, V: Row> {
    guarded: &'o Guarded<V>,
    hash: u64,
    key: &'o Key,
    ticket: u32,
}

impl<'o, V: Row> Mark<'o, V> {
    fn leave(guarded: &'o Guarded<V>, shard: &mut Shard<V>, hash: u64, key: &'o Key) -> Self {
        Self {
            guarded,
            hash,
            key,
            ticket: shard.begin_loading(hash, key),
        }
    }

    /// Puts the row that was read in the mark's place, if the mark is still there.
    fn replace(self, row: Loaded<V>) -> MutexGuard<'o, Shard<V>> {
        let mut shard = lock(&self.guarded.shard);
        let held = row.value.as_ref().map_or(0, Row::memory);
        if let Some(entry) = shard.loaded(self.hash, self.key, self.ticket) {
            entry.value = row.value;
            entry.expires_at = row.expires_at;
            entry.ttl = row.ttl;
            shard.resized(0, held);
        }
        self.guarded.loaded.notify_all();
        std::mem::forget(self);
        shard
    }
}

impl<V: Row> Drop for Mark<'_, V> {
    fn drop(&mut self) {
        lock(&self.guarded.shard).abandon(self.hash, self.key, self.ticket);
        self.guarded.loaded.notify_all();
    }
}
