//! What goes wrong in a closure, a value or a row, and that nothing else does.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

use ratevault::{
    Clock, Error, HitLog, Key, Limiter, MemoryStorage, Quota, Row, SlidingWindow, Storage,
    Timestamp, Vault, VaultBuilder,
};
use serde::{Deserialize, Serialize};

use super::{RARELY, add, add_one, buffered, on_disk, rows, try_add_one};
use crate::support::faulty::Faulty;
use crate::support::file::{Contents, damage_row};
use crate::support::{DAY, MINUTE, Number, START, eventually, key, manual_clock, single_threaded};

fn in_memory() -> Vault<Number> {
    let vault = Vault::builder("numbers").in_memory();
    vault.durability(RARELY).open().unwrap()
}

/// The result of `act`, which might wait for itself for ever.
fn in_time<T: Send + 'static>(act: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, result) = mpsc::channel();
    thread::spawn(move || done.send(act()));
    result.recv_timeout(MINUTE / 4).unwrap()
}

// Closed.

#[test]
fn after_closing_everything_is_closed() {
    let storage = Arc::new(Faulty::default());
    let vault = buffered(&storage).open().unwrap();
    add_one(&vault, "ada");
    vault.close().unwrap();
    let pending = vault.update_async(&key("ada"), add);
    let results = [
        try_add_one(&vault, "ada").map(drop),
        try_add_one(&vault, "stranger").map(drop),
        single_threaded().block_on(pending).map(drop),
        vault.get(&key("ada")).map(drop),
        vault.get(&key("stranger")).map(drop),
        vault.put(&key("ada"), Number(1), MINUTE),
        vault.remove(&key("ada")).map(drop),
        vault.remove_endpoint("test").map(drop),
        vault.scan().try_for_each(|row| row.map(drop)),
        vault.sweep().map(drop),
        vault.stats().map(drop),
        vault.flush(),
    ];
    for (number, result) in results.into_iter().enumerate() {
        assert!(
            matches!(result, Err(Error::Closed { .. })),
            "{number}: {result:?}"
        );
    }
    assert_eq!(on_disk(&storage, "ada"), Some(Number(1)));
}

/// A limiter with one client in memory.
fn limiter_that_knows_ada() -> Limiter<SlidingWindow> {
    let vault = Vault::<HitLog>::builder("limits")
        .in_memory()
        .durability(RARELY);
    let window = SlidingWindow::new(Quota::per_hour(5).unwrap()).unwrap();
    let limiter = Limiter::new(vault.open().unwrap(), window);
    limiter.check("login", "ada").unwrap();
    limiter
}

#[test]
fn a_limiter_over_a_closed_vault_hears_it_for_clients_in_memory_too() {
    let limiter = limiter_that_knows_ada();
    limiter.vault().close().unwrap();
    let pending = limiter.check_async("login", "ada");
    let results = [
        limiter.check("login", "ada"),
        single_threaded().block_on(pending),
        limiter.peek("login", "ada"),
    ];
    for result in results {
        assert!(matches!(result, Err(Error::Closed { .. })), "{result:?}");
    }
}

#[test]
fn what_is_answered_while_the_file_closes_is_on_disk() {
    let storage = Arc::new(Faulty::default());
    for _ in 0..20 {
        let vault = buffered(&storage).open().unwrap();
        let before = vault.get(&key("ada")).unwrap().unwrap_or_default().0;
        let answered = thread::scope(|scope| {
            let adding = scope.spawn(|| {
                let mut answered = before;
                while let Ok(number) = try_add_one(&vault, "ada") {
                    answered = number;
                }
                answered
            });
            eventually("some are answered", || {
                vault.get(&key("ada")).unwrap().unwrap_or_default().0 > before + 10
            });
            vault.close().unwrap();
            adding.join().unwrap()
        });
        assert_eq!(on_disk(&storage, "ada"), Some(Number(answered)));
    }
}

// Inside an update.

#[test]
fn a_vault_used_inside_an_update_in_memory_is_an_error_not_a_hang() {
    let committed = Vault::<Number>::builder("numbers")
        .in_memory()
        .open()
        .unwrap();
    let (vault, other) = (in_memory(), in_memory());
    for client in ["new", "known"] {
        add_one(&vault, "known");
        let (same, other, committed) = (vault.clone(), other.clone(), committed.clone());
        let client = key(client);
        let updated = vault.clone();
        let results = in_time(move || {
            updated.update(&client, move |_| {
                let pending = |vault: &Vault<Number>| {
                    let pending = vault.update_async(&key("b"), add);
                    single_threaded().block_on(pending).map(drop)
                };
                [
                    try_add_one(&same, "known").map(drop),
                    try_add_one(&other, "b").map(drop),
                    try_add_one(&committed, "b").map(drop),
                    pending(&same),
                    pending(&other),
                    pending(&committed),
                    same.put(&key("b"), Number(1), MINUTE),
                    same.remove(&key("b")).map(drop),
                    same.remove_endpoint("test").map(drop),
                    same.scan().try_for_each(|row| row.map(drop)),
                    same.sweep().map(drop),
                    same.flush(),
                    same.close(),
                    buffered(&Arc::new(Faulty::default())).open().map(drop),
                ]
            })
        });
        for (number, result) in results.unwrap().into_iter().enumerate() {
            assert!(
                matches!(result, Err(Error::InsideUpdate)),
                "{number}: {result:?}"
            );
        }
    }
    assert_eq!(add_one(&vault, "known"), 3);
    assert_eq!(add_one(&other, "b"), 1);
}

#[test]
fn a_limiter_used_inside_an_update_in_memory_is_an_error() {
    let limiter = limiter_that_knows_ada();
    let same = limiter.clone();
    let results = in_time(move || {
        in_memory().update(&key("a"), move |_| {
            let pending = same.check_async("login", "ada");
            [
                same.check("login", "ada"),
                single_threaded().block_on(pending),
            ]
        })
    });
    for result in results.unwrap() {
        assert!(matches!(result, Err(Error::InsideUpdate)), "{result:?}");
    }
    assert_eq!(limiter.peek("login", "ada").unwrap().remaining(), 4);
}

#[test]
fn reading_a_buffered_row_inside_its_update_does_not_hang() {
    for client in ["new", "known"] {
        let vault = in_memory();
        add_one(&vault, "known");
        let client = key(client);
        let read = in_time(move || {
            let (same, again) = (vault.clone(), client.clone());
            vault.update(&client, move |_| same.get(&again))
        });
        // The latest commit is not the truth here, and the truth is being changed.
        assert!(matches!(read, Ok(Err(Error::InsideUpdate))), "{read:?}");
    }
}

#[test]
fn the_last_handle_may_be_dropped_inside_an_update_in_memory() {
    let storage = Arc::new(Faulty::default());
    let vault = buffered(&storage).open().unwrap();
    add_one(&vault, "ada");
    let (sender, handles) = mpsc::channel::<Vault<Number>>();
    let other = in_memory();
    sender.send(vault).unwrap();
    in_time(move || other.update(&key("a"), move |_| drop(handles.recv()))).unwrap();
    let vault = buffered(&storage).open().unwrap();
    assert_eq!(add_one(&vault, "ada"), 2);
}

// Values.

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Text(String);

impl Row for Text {
    const KIND: &'static str = "text/1";
}

#[test]
fn a_value_that_is_too_large_leaves_the_row_as_it_was() {
    let vault = Vault::<Text>::builder("texts")
        .in_memory()
        .durability(RARELY);
    let vault = vault.open().unwrap();
    let large = || Text("x".repeat(2 << 20));
    let small = Text("small".into());
    vault.put(&key("ada"), small.clone(), MINUTE).unwrap();
    for client in ["ada", "new"] {
        let pending = vault.update_async(&key(client), move |slot| {
            drop(slot.take());
            slot.put(large(), MINUTE);
        });
        let results = [
            vault.put(&key(client), large(), MINUTE),
            vault.update(&key(client), move |slot| slot.put(large(), MINUTE)),
            single_threaded().block_on(pending),
        ];
        for result in results {
            assert!(matches!(result, Err(Error::Encode { .. })), "{result:?}");
        }
    }
    assert_eq!(vault.get(&key("ada")).unwrap(), Some(small.clone()));
    assert_eq!(vault.get(&key("new")).unwrap(), None);
    assert_eq!(rows(&vault), [("ada".into(), small)]);
}

/// Whether some values may not be encoded for now.
static IS_TOUCHY: AtomicBool = AtomicBool::new(false);

#[derive(Debug, PartialEq, Deserialize)]
struct Touchy(u64);

impl Row for Touchy {
    const KIND: &'static str = "touchy/1";
}

impl Serialize for Touchy {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        assert!(self.0 != 13 || !IS_TOUCHY.load(Ordering::SeqCst), "touchy");
        self.0.serialize(serializer)
    }
}

#[test]
fn a_value_whose_encoding_panics_leaves_the_row_as_it_was() {
    IS_TOUCHY.store(true, Ordering::SeqCst);
    let vault = Vault::<Touchy>::builder("touchy")
        .in_memory()
        .durability(RARELY);
    let vault = vault.open().unwrap();
    vault.put(&key("ada"), Touchy(1), MINUTE).unwrap();
    let unlucky = || vault.put(&key("ada"), Touchy(13), MINUTE);
    catch_unwind(AssertUnwindSafe(unlucky)).unwrap_err();
    assert_eq!(vault.get(&key("ada")).unwrap(), Some(Touchy(1)));
    vault.flush().unwrap();
    assert_eq!(rows(&vault), [("ada".into(), Touchy(1))]);
}

// Damaged rows.

/// Rows of which the first is damaged, in a file that is closed.
fn damaged(path: &Path) {
    let vault = Vault::<Number>::builder("numbers")
        .path(path)
        .open()
        .unwrap();
    vault.put(&key("ada"), Number(7), DAY).unwrap();
    vault.put(&key("bob"), Number(1), DAY).unwrap();
    vault.close().unwrap();
    let contents = Contents::read(path, "numbers");
    damage_row(path, "numbers", contents.rows.keys().next().unwrap());
}

fn reopened(path: &Path) -> Vault<Number> {
    let vault = Vault::<Number>::builder("numbers").path(path);
    vault.durability(RARELY).open().unwrap()
}

#[track_caller]
fn assert_corrupt<T: std::fmt::Debug>(result: Result<T, Error>) {
    match result {
        Err(Error::CorruptRow { client, .. }) => assert_eq!(client, "ada"),
        other => panic!("{other:?}"),
    }
}

fn mended_by(mend: impl FnOnce(&Vault<Number>, &Key), expected: &[(&str, u64)]) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vault.redb");
    damaged(&path);
    let vault = reopened(&path);
    // It is refused every time, and nobody else is.
    for _ in 0..2 {
        assert_corrupt(try_add_one(&vault, "ada"));
        assert_corrupt(vault.get(&key("ada")));
        assert_corrupt(single_threaded().block_on(vault.update_async(&key("ada"), add)));
    }
    assert_eq!(add_one(&vault, "bob"), 2);
    mend(&vault, &key("ada"));
    let expected: Vec<_> = expected
        .iter()
        .map(|(client, number)| ((*client).to_owned(), Number(*number)))
        .collect();
    assert_eq!(rows(&vault), expected);
    vault.close().unwrap();
    Contents::read(&path, "numbers").check_invariant();
    assert_eq!(rows(&reopened(&path)), expected);
}

#[test]
fn a_damaged_row_is_refused_until_it_is_removed() {
    mended_by(
        |vault, key| assert!(vault.remove(key).unwrap()),
        &[("bob", 2)],
    );
}

#[test]
fn a_damaged_row_is_refused_until_it_is_replaced() {
    let put = |vault: &Vault<Number>, key: &Key| vault.put(key, Number(5), DAY).unwrap();
    mended_by(put, &[("ada", 5), ("bob", 2)]);
}

#[test]
fn a_damaged_row_is_refused_until_its_endpoint_is_removed() {
    let remove = |vault: &Vault<Number>, _: &Key| {
        assert_eq!(vault.remove_endpoint("test").unwrap(), 2);
    };
    mended_by(remove, &[]);
}

#[test]
fn a_damaged_log_is_refused_until_it_is_reset() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vault.redb");
    let open = || {
        let vault = Vault::<HitLog>::builder("limits")
            .path(&path)
            .durability(RARELY);
        let window = SlidingWindow::new(Quota::per_hour(5).unwrap()).unwrap();
        Limiter::new(vault.open().unwrap(), window)
    };
    let limiter = open();
    limiter.check("login", "ada").unwrap();
    limiter.vault().close().unwrap();
    let contents = Contents::read(&path, "limits");
    damage_row(&path, "limits", contents.rows.keys().next().unwrap());
    let limiter = open();
    for _ in 0..2 {
        assert_corrupt(limiter.check("login", "ada"));
        assert_corrupt(single_threaded().block_on(limiter.check_async("login", "ada")));
        assert_corrupt(limiter.peek("login", "ada"));
    }
    limiter.reset("login", "ada").unwrap();
    assert_eq!(limiter.check("login", "ada").unwrap().remaining(), 4);
}

#[test]
fn a_damaged_row_that_could_not_be_replaced_is_still_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vault.redb");
    let open = || {
        Vault::<Text>::builder("texts")
            .path(&path)
            .durability(RARELY)
    };
    let vault = open().open().unwrap();
    vault.put(&key("ada"), Text("small".into()), DAY).unwrap();
    vault.close().unwrap();
    let contents = Contents::read(&path, "texts");
    damage_row(&path, "texts", contents.rows.keys().next().unwrap());
    let vault = open().open().unwrap();
    let large = Text("x".repeat(2 << 20));
    let replaced = vault.put(&key("ada"), large, DAY);
    assert!(
        matches!(replaced, Err(Error::Encode { .. })),
        "{replaced:?}"
    );
    // To take it for a row that is not there would forget a count.
    assert_corrupt(vault.get(&key("ada")));
    assert_corrupt(vault.update(&key("ada"), |slot| slot.value().cloned()));
}

/// A row that says it is a number and is not encoded as one.
#[derive(Debug, Serialize, Deserialize)]
struct NoNumber(String);

impl Row for NoNumber {
    const KIND: &'static str = Number::KIND;
}

#[test]
fn a_row_that_does_not_decode_is_gone_once_it_has_expired() {
    let (storage, clock) = (Arc::new(Faulty::default()), manual_clock());
    let on = |durability| -> VaultBuilder<Number> {
        let vault = buffered(&storage).clock(clock.clone() as _);
        vault.durability(durability).background_sweep(false)
    };
    let vault = Vault::<NoNumber>::builder("numbers").storage(Arc::clone(&storage));
    let vault = vault.clock(clock.clone() as _).open().unwrap();
    vault
        .put(&key("ada"), NoNumber("seven".into()), MINUTE)
        .unwrap();
    vault.close().unwrap();
    for durability in [ratevault::Durability::Committed, RARELY] {
        clock.set(Timestamp::from_millis(START));
        let vault = on(durability).open().unwrap();
        assert_corrupt(vault.update(&key("ada"), |slot| slot.value().copied()));
        clock.advance(2 * MINUTE);
        let found = vault.update(&key("ada"), |slot| slot.value().copied());
        assert_eq!(found.unwrap(), None, "{durability:?}");
    }
}

// The writer.

/// A clock that the writer cannot read once it is broken.
#[derive(Debug, Default)]
struct Broken(AtomicBool);

impl Clock for Broken {
    fn now(&self) -> Timestamp {
        let is_writer = thread::current().name() == Some("ratevault-writer");
        assert!(!is_writer || !self.0.load(Ordering::SeqCst), "broken");
        Timestamp::from_millis(START)
    }
}

#[test]
fn when_the_writer_is_gone_nothing_is_answered_from_memory() {
    let clock = Arc::new(Broken::default());
    let vault = Vault::<Number>::builder("numbers")
        .in_memory()
        .clock(clock.clone());
    let vault = vault.durability(RARELY).open().unwrap();
    add_one(&vault, "ada");
    vault.flush().unwrap();
    clock.0.store(true, Ordering::SeqCst);
    eventually("the writer is gone", || {
        try_add_one(&vault, "stranger").is_err()
    });
    eventually("so is the answer", || try_add_one(&vault, "ada").is_err());
}

/// A storage whose `fails_in`-th sync from now on syncs, and says that it has not.
#[derive(Debug, Default)]
struct Lying {
    inner: MemoryStorage,
    fails_in: AtomicU64,
}

impl Storage for Lying {
    fn len(&self) -> io::Result<u64> {
        self.inner.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.inner.read(offset, out)
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.inner.write(offset, data)
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        self.inner.set_len(length)
    }

    fn sync(&self) -> io::Result<()> {
        self.inner.sync()?;
        if self.fails_in.fetch_sub(1, Ordering::SeqCst) == 1 {
            return Err(io::Error::other("not synced"));
        }
        Ok(())
    }
}

#[test]
fn what_a_transaction_of_unknown_outcome_removed_is_not_remembered() {
    for fails_in in 1..4 {
        let storage = Arc::new(Lying::default());
        let vault = Vault::builder("numbers").storage(storage.clone());
        let vault: Vault<Number> = vault.durability(RARELY).open().unwrap();
        vault.put(&key("ada"), Number(5), DAY).unwrap();
        vault.flush().unwrap();
        storage.fails_in.store(fails_in, Ordering::SeqCst);
        let first = vault.remove_endpoint("test");
        storage.fails_in.store(0, Ordering::SeqCst);
        // Until the file is open again.
        eventually("the file is open again", || {
            vault.remove_endpoint("test").is_ok()
        });
        assert_eq!(vault.get(&key("ada")).unwrap(), None, "{first:?}");
        assert_eq!(vault.len().unwrap(), 0);
    }
}
