//! The locking of the overlay, in many orders of events, tried out by `shuttle`.
//!
//! The file is a map, and the writer is whoever holds its lock. What the newest value of each key is
//! is told by the closures themselves, which run one at a time: each checks what it finds against
//! what the one before it left.

use std::collections::BTreeMap;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::Mutex as Plain;

use serde::{Deserialize, Serialize};
use shuttle::thread::{self, JoinHandle};

use super::super::row::Header;
use super::*;
use crate::clock::ManualClock;

const ITERATIONS: usize = 1_200;
const HOUR: Duration = Duration::from_secs(3_600);
const NOW: u64 = 1_000;

/// Tries `run` in orders at random, and in those that need few preemptions.
fn check(run: impl Fn() + Copy + Send + Sync + 'static) {
    shuttle::check_random(run, ITERATIONS);
    for depth in 2..=4 {
        shuttle::check_pct(run, ITERATIONS / 2, depth);
    }
}

/// A counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Count(u32);

impl Row for Count {
    const KIND: &'static str = "count/1";

    fn memory(&self) -> usize {
        8
    }
}

/// As `World::count`, of a row in memory.
struct CountInPlace<'a>(&'a World, &'a Key);

impl Change<Count> for CountInPlace<'_> {
    type Answer = ();

    fn apply(self, count: &mut Count, _: Timestamp) -> ((), Option<Duration>) {
        let Self(world, key) = self;
        count.0 += 1;
        let mut truth = world.truth.lock().expect("whole");
        truth.insert(key.clone(), *count);
        ((), Some(HOUR))
    }
}

/// An overlay in front of a file.
struct World {
    overlay: Overlay<Count>,
    rows: Mutex<BTreeMap<Key, (Header, Vec<u8>)>>,
    /// Held by who is the writer.
    writer: Mutex<()>,
    /// The newest value of each key, as the last closure left it.
    truth: Plain<BTreeMap<Key, Count>>,
}

fn key(name: &str) -> Key {
    Key::new("e", name).expect("a key")
}

fn cause() -> Cause {
    Cause::new("the disk is full")
}

impl World {
    /// `bytes`: how many the memory may hold.
    fn new(bytes: usize) -> Arc<Self> {
        let place = Place {
            path: Path::new("f").into(),
            table: "t".into(),
            clock: Arc::new(ManualClock::new(Timestamp::from_millis(NOW))),
            queue: Arc::default(),
        };
        let mut overlay = Overlay::new(place, HOUR, bytes);
        // All keys meet in one shard, however they are hashed: so a schedule can be replayed.
        overlay.shards = std::mem::take(&mut overlay.shards)
            .into_iter()
            .take(1)
            .collect();
        overlay.share = bytes;
        Arc::new(Self {
            overlay,
            rows: Mutex::default(),
            writer: Mutex::new(()),
            truth: Plain::default(),
        })
    }

    fn spawn(self: &Arc<Self>, run: impl FnOnce(&Self) + Send + 'static) -> JoinHandle<()> {
        let world = Arc::clone(self);
        thread::spawn(move || run(&world))
    }

    /// The row of `key` in the latest commit.
    fn load(&self, key: &Key) -> Stored {
        let row = lock(&self.rows).get(key).cloned();
        row.map_or(Stored::Missing, |(header, value)| {
            Stored::Whole(header, value)
        })
    }

    fn truth(&self, key: &Key) -> Option<Count> {
        self.truth.lock().expect("whole").get(key).copied()
    }

    /// Adds one to the count of `key`, if it is below `limit`, for `ttl`; as `Vault::update` does.
    fn count(&self, key: &Key, limit: u32, ttl: Duration) -> Result<bool> {
        self.count_from(key, limit, ttl, |key| Ok(self.load(key)))
    }

    fn count_from(
        &self,
        key: &Key,
        limit: u32,
        ttl: Duration,
        load: impl Fn(&Key) -> Result<Stored>,
    ) -> Result<bool> {
        let count = |slot: &mut Slot<Count>| {
            let mut truth = self.truth.lock().expect("whole");
            assert_eq!(
                slot.value(),
                truth.get(key),
                "not the newest value of {key}"
            );
            let used = slot.take().map_or(0, |count| count.0);
            if used >= limit {
                return false;
            }
            slot.put(Count(used + 1), ttl);
            if ttl.is_zero() {
                truth.remove(key);
            } else {
                truth.insert(key.clone(), Count(used + 1));
            }
            true
        };
        let overlay = &self.overlay;
        match overlay.update(key, IfDamaged::Refuse, Patience::Read, &load, count) {
            Attempt::Done(answered) => Ok(answered?.expect("no panic")),
            Attempt::Elsewhere(count) => {
                let _writer = lock(&self.writer);
                match overlay.update(key, IfDamaged::Refuse, Patience::Writer, &load, count) {
                    Attempt::Done(answered) => Ok(answered?.expect("no panic")),
                    Attempt::Elsewhere(_) => panic!("the writer has nowhere to go"),
                }
            }
        }
    }

    fn dirty(&self) -> Vec<Dirty> {
        let mut rows = self.overlay.dirty();
        self.overlay.list(&mut rows);
        rows.collect()
    }

    /// A flush of the writer.
    fn flush(&self, commits: bool) {
        let _writer = lock(&self.writer);
        let since = self.overlay.begin_flush();
        let rows = self.dirty();
        self.carry(&rows, commits);
        self.overlay.end_flush(since, commits);
    }

    /// A flush that somebody asked for: the writer gets to it later.
    fn flush_asked_for(&self, commits: bool) {
        let since = self.overlay.begin_flush();
        let rows = self.dirty();
        if !rows.is_empty() {
            let _writer = lock(&self.writer);
            self.carry(&rows, commits);
        }
        self.overlay.end_flush(since, commits);
    }

    /// One transaction with these rows, which commits or does not.
    fn carry(&self, dirty: &[Dirty], commits: bool) {
        let mut staging = Staging::default();
        self.overlay.stage(dirty, &mut staging);
        let failure = cause();
        let mut gone = Vec::new();
        if commits {
            let mut rows = lock(&self.rows);
            for (place, key) in dirty.iter().map(|row| &row.key).enumerate() {
                let Some((row, value)) = staging.get(place) else {
                    continue;
                };
                match value.filter(|_| row.expires_at > NOW) {
                    Some(value) => {
                        let header = Header {
                            in_shared_class: false,
                            expires_at: row.expires_at,
                            ttl: row.ttl,
                            filed_at: row.expires_at,
                        };
                        rows.insert(key.clone(), (header, value.to_vec()));
                    }
                    None => gone.extend(rows.remove(key).map(|_| key.clone())),
                }
            }
        }
        self.overlay.are_gone(&gone);
        self.overlay
            .settle(dirty, if commits { None } else { Some(&failure) });
    }

    /// Removes the row of `key` from the file if it has expired and is not newer in memory.
    fn sweep(&self, key: &Key) {
        let _writer = lock(&self.writer);
        if self.overlay.is_pinned(key) {
            return;
        }
        let mut rows = lock(&self.rows);
        let has_expired = rows.get(key).is_some_and(|(header, _)| {
            // As a deadline that has passed: no closure sees such a row.
            header.expires_at <= NOW
        });
        if has_expired {
            rows.remove(key);
        }
        drop(rows);
        if has_expired {
            self.overlay.are_gone(std::slice::from_ref(key));
        }
    }

    /// Puts a row in the file that memory knows nothing of.
    fn store(&self, key: &Key, count: Count, expires_at: u64) {
        let header = Header {
            in_shared_class: false,
            expires_at,
            ttl: 1,
            filed_at: expires_at,
        };
        let value = codec::encode(&count).expect("encodes");
        lock(&self.rows).insert(key.clone(), (header, value));
        if expires_at > NOW {
            let mut truth = self.truth.lock().expect("whole");
            truth.insert(key.clone(), count);
        }
    }

    /// Drops the row of `key` from memory if it may go, and the mark of a load.
    fn evict(&self, key: &Key) {
        let _writer = lock(&self.writer);
        self.overlay.forget(std::slice::from_ref(key));
    }

    /// Once nobody does anything: what is dirty waits for a flush, and after that the file has it.
    fn settle_down(&self) {
        let overlay = &self.overlay;
        let dirty = self.dirty();
        if !dirty.is_empty() {
            assert!(overlay.flush_in().is_some(), "nobody flushes {dirty:?}");
            assert!(overlay.health().oldest_unflushed.is_some());
        }
        self.flush(true);
        self.is_in_the_file();
    }

    fn is_in_the_file(&self) {
        assert_eq!(self.dirty(), []);
        let rows = lock(&self.rows);
        let live = rows.iter().filter(|(_, row)| row.0.expires_at > NOW);
        let decoded = live.map(|(key, row)| (key.clone(), codec::decode(&row.1).expect("decodes")));
        let stored: BTreeMap<Key, Count> = decoded.collect();
        assert_eq!(stored, *self.truth.lock().expect("whole"));
    }
}

fn join(threads: impl IntoIterator<Item = JoinHandle<()>>) {
    for thread in threads {
        thread.join().expect("no panic");
    }
}

const ROOM: usize = 1 << 20;

#[test]
fn threads_on_one_key_never_admit_more_than_the_limit() {
    check(|| {
        let world = World::new(ROOM);
        let admitted = Arc::new(Plain::new(0));
        let callers = (0..3).map(|_| {
            let admitted = Arc::clone(&admitted);
            world.spawn(move |world| {
                for _ in 0..2 {
                    let is_admitted = world.count(&key("a"), 4, HOUR).expect("open");
                    *admitted.lock().expect("whole") += u32::from(is_admitted);
                }
            })
        });
        let mut threads: Vec<_> = callers.collect();
        threads.push(world.spawn(|world| {
            world.flush(false);
            world.flush(true);
            world.evict(&key("a"));
        }));
        join(threads);
        assert_eq!(*admitted.lock().expect("whole"), 4);
        assert_eq!(world.truth(&key("a")), Some(Count(4)));
        world.settle_down();
    });
}

#[test]
fn a_late_load_never_replaces_a_newer_row() {
    check(|| {
        let world = World::new(ROOM);
        world.store(&key("a"), Count(7), u64::MAX);
        let late = world.spawn(|world| {
            world.count(&key("a"), 99, HOUR).expect("open");
        });
        let busy = world.spawn(|world| {
            // Takes the mark of the load away.
            world.evict(&key("a"));
            world.count(&key("a"), 99, HOUR).expect("open");
            world.flush(true);
            world.evict(&key("a"));
            world.count(&key("a"), 99, HOUR).expect("open");
        });
        join([late, busy]);
        assert_eq!(world.truth(&key("a")), Some(Count(10)));
        world.settle_down();
    });
}

#[test]
fn the_sweep_takes_nothing_that_is_newer_in_memory() {
    check(|| {
        let world = World::new(ROOM);
        world.store(&key("a"), Count(7), NOW);
        let callers = (0..2).map(|_| {
            world.spawn(move |world| {
                world.count(&key("a"), 99, HOUR).expect("open");
            })
        });
        let mut threads: Vec<_> = callers.collect();
        threads.push(world.spawn(|world| {
            world.sweep(&key("a"));
            world.flush(true);
            world.sweep(&key("a"));
        }));
        join(threads);
        assert_eq!(world.truth(&key("a")), Some(Count(2)));
        world.settle_down();
    });
}

#[test]
fn an_update_during_the_commit_is_not_lost() {
    for commits in [true, false] {
        check(move || {
            let world = World::new(ROOM);
            let callers = (0..2).map(|number| {
                world.spawn(move |world| {
                    world.count(&key("a"), 99, HOUR).expect("open");
                    // A row that has expired at once is removed from the file.
                    let ttl = if number == 0 { Duration::ZERO } else { HOUR };
                    world.count(&key("b"), 99, ttl).expect("open");
                    world.count(&key("a"), 99, HOUR).expect("open");
                })
            });
            let mut threads: Vec<_> = callers.collect();
            threads.push(world.spawn(move |world| {
                world.flush(commits);
                world.evict(&key("a"));
                world.evict(&key("b"));
                world.flush(!commits);
                world.evict(&key("a"));
            }));
            join(threads);
            assert_eq!(world.truth(&key("a")), Some(Count(4)));
            world.settle_down();
        });
    }
}

#[test]
fn flushes_at_the_same_time_leave_nothing_behind() {
    for commits in [true, false] {
        check(move || {
            let world = World::new(ROOM);
            let caller = world.spawn(|world| {
                world.count(&key("a"), 99, HOUR).expect("open");
                world.count(&key("a"), 99, HOUR).expect("open");
            });
            let writer = world.spawn(move |world| world.flush(commits));
            let asked = world.spawn(move |world| world.flush_asked_for(true));
            join([caller, writer, asked]);
            world.settle_down();
        });
    }
}

#[test]
fn who_lists_what_is_dirty_takes_nothing_in_flight_for_carried() {
    check(|| {
        let world = World::new(ROOM);
        for name in ["a", "b"] {
            world.count(&key(name), 99, HOUR).expect("open");
        }
        let writer = world.spawn(|world| {
            let _writer = lock(&world.writer);
            let since = world.overlay.begin_flush();
            let rows = world.dirty();
            let (first, second) = rows.split_at(1);
            world.carry(first, true);
            world.carry(second, false);
            world.overlay.end_flush(since, false);
        });
        let asker = world.spawn(|world| drop(world.dirty()));
        join([writer, asker]);
        world.settle_down();
    });
}

#[test]
fn a_flush_that_was_asked_for_brings_everything_that_was_dirty() {
    check(|| {
        let world = World::new(ROOM);
        world.count(&key("a"), 99, HOUR).expect("open");
        let writer = world.spawn(|world| world.flush(false));
        let asked = world.spawn(|world| {
            world.flush_asked_for(true);
            world.is_in_the_file();
        });
        join([writer, asked]);
    });
}

#[test]
fn who_waits_for_a_load_is_woken_however_it_ends() {
    /// How the first load of a thread ends.
    #[derive(Clone, Copy, Debug)]
    enum End {
        Well,
        Failing,
        Panicking,
    }
    check(|| {
        let world = World::new(ROOM);
        world.store(&key("a"), Count(7), u64::MAX);
        let caller = |end: End| {
            world.spawn(move |world| {
                let load = |key: &Key| match (end, world.load(key)) {
                    (End::Well, stored) => Ok(stored),
                    (End::Failing, _) => Err(corrupt_row("t", key.as_bytes())),
                    // As a panic that is reported nowhere.
                    (End::Panicking, _) => resume_unwind(Box::new(())),
                };
                let count = || world.count_from(&key("a"), 99, HOUR, load);
                let counted = catch_unwind(AssertUnwindSafe(count));
                match (end, &counted) {
                    (_, Ok(Ok(true)))
                    | (End::Failing, Ok(Err(Error::CorruptRow { .. })))
                    | (End::Panicking, Err(_)) => {}
                    other => panic!("{other:?}"),
                }
            })
        };
        let ends = [End::Panicking, End::Failing, End::Well, End::Well];
        let mut threads: Vec<_> = ends.map(caller).into();
        // Another key of the shard.
        threads.push(world.spawn(|world| {
            world.count(&key("b"), 99, HOUR).expect("open");
        }));
        join(threads);
        assert!(world.truth(&key("a")) >= Some(Count(9)));
        world.settle_down();
    });
}

#[test]
fn a_load_whose_mark_is_taken_is_begun_again() {
    check(|| {
        let world = World::new(ROOM);
        world.store(&key("a"), Count(7), u64::MAX);
        let callers = (0..3).map(|_| {
            world.spawn(|world| {
                world.count(&key("a"), 99, HOUR).expect("open");
            })
        });
        let mut threads: Vec<_> = callers.collect();
        threads.push(world.spawn(|world| {
            world.evict(&key("a"));
            world.evict(&key("a"));
        }));
        join(threads);
        assert_eq!(world.truth(&key("a")), Some(Count(10)));
        world.settle_down();
    });
}

#[test]
fn no_room_drops_nothing_that_is_newer_than_the_file() {
    check(|| {
        let world = World::new(0);
        let counted = Arc::new(Mutex::new(BTreeMap::new()));
        let callers = ["a", "b"].map(|name| {
            let counted = Arc::clone(&counted);
            world.spawn(move |world| {
                for name in [name, "c", name] {
                    // After a flush that failed there may be no room.
                    if world.count(&key(name), 99, HOUR).is_ok() {
                        *lock(&counted).entry(name).or_insert(0) += 1;
                    }
                }
            })
        });
        let writer = world.spawn(|world| {
            world.flush(false);
            world.flush(true);
            let shards = &world.overlay.shards;
            let shrink = |guarded: &Guarded<_>| {
                // The first time round only takes away that they were used.
                let mut shard = lock(&guarded.shard);
                shard.shrink_to(0, world.overlay.transaction());
                shard.shrink_to(0, world.overlay.transaction());
            };
            shards.iter().for_each(shrink);
        });
        join(callers.into_iter().chain([writer]));
        for (name, count) in &*lock(&counted) {
            assert_eq!(world.truth(&key(name)), Some(Count(*count)));
        }
        world.settle_down();
    });
}

#[test]
fn nothing_is_counted_after_the_last_flush_has_collected() {
    check(|| {
        let world = World::new(ROOM);
        world.store(&key("a"), Count(7), u64::MAX);
        let callers = (0..2).map(|_| {
            world.spawn(|world| {
                for _ in 0..3 {
                    match world.count(&key("a"), 99, HOUR) {
                        Ok(_) => {}
                        Err(Error::Closed { .. }) => return,
                        Err(other) => panic!("{other}"),
                    }
                }
            })
        });
        // As a limiter does in memory.
        let in_place = world.spawn(|world| {
            for _ in 0..2 {
                let key = key("d");
                world.overlay.change(key.parts(), CountInPlace(world, &key));
            }
        });
        let closer = world.spawn(|world| {
            world.count(&key("d"), 99, HOUR).ok();
            world.overlay.close();
            world.flush(true);
            // The file is closed from here on.
            world.is_in_the_file();
        });
        join(callers.into_iter().chain([in_place, closer]));
        world.is_in_the_file();
    });
}

impl Default for Count {
    fn default() -> Self {
        Self(0)
    }
}

#[test]
fn a_look_sees_what_was_newest_when_it_began() {
    check(|| {
        let world = World::new(ROOM);
        world.store(&key("a"), Count(1), u64::MAX);
        let caller = world.spawn(|world| {
            world.count(&key("a"), 99, HOUR).expect("open");
            world.count(&key("a"), 99, HOUR).expect("open");
        });
        let writer = world.spawn(|world| {
            world.flush(true);
            world.evict(&key("a"));
            world.flush(true);
            world.evict(&key("a"));
        });
        let looker = world.spawn(|world| {
            for _ in 0..2 {
                let newest = world.truth(&key("a"));
                let found = match world.overlay.look(&key("a"), |count, _| count.copied()) {
                    Ok(found) => found.expect("open"),
                    Err(_) => match world.load(&key("a")) {
                        Stored::Whole(_, bytes) => codec::decode(&bytes),
                        _ => None,
                    },
                };
                assert!(found >= newest, "{found:?} is older than {newest:?}");
            }
        });
        join([caller, writer, looker]);
        world.settle_down();
    });
}
