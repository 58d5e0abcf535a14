//! The memory is full: of rows that the disk does not take, or takes slowly.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use ratevault::{Error, Row, Vault};
use serde::{Deserialize, Serialize};

use super::{RARELY, add, add_one, buffered, give_way, in_memory, on_disk, rows, try_add_one};
use crate::support::faulty::Faulty;
use crate::support::{MINUTE, Number, eventually, key, single_threaded};

/// As many clients, by name.
fn clients(count: usize) -> Vec<String> {
    (0..count).map(|client| client.to_string()).collect()
}

/// Into how many parts the memory is split at most, each of which may hold one row too many.
fn most_shards() -> usize {
    16 * thread::available_parallelism().map_or(1, usize::from)
}

/// How many small rows fit into `bytes` at most; one takes two cache lines.
fn most_rows(bytes: usize) -> usize {
    bytes / 128 + most_shards()
}

#[track_caller]
fn assert_unavailable<T: std::fmt::Debug>(result: Result<T, Error>) {
    assert!(
        matches!(result, Err(Error::Unavailable { .. })),
        "{result:?}"
    );
}

#[test]
fn with_a_failing_disk_decisions_in_memory_go_on_and_newcomers_are_refused_at_once() {
    const BYTES: usize = 20_000;
    let storage = Arc::new(Faulty::default());
    let vault = buffered(&storage).cache_bytes(0).buffer_bytes(BYTES);
    let vault = vault.open().unwrap();
    let clients = clients(3 * most_rows(BYTES));
    for client in &clients {
        add_one(&vault, client);
    }
    vault.flush().unwrap();

    storage.fail(true);
    let known: Vec<_> = clients
        .iter()
        .filter(|client| try_add_one(&vault, client).is_ok())
        .collect();
    assert!(
        (1..=most_rows(BYTES)).contains(&known.len()),
        "{}",
        known.len()
    );
    // It is full of rows that only it has. None of them gives way to anybody, and nobody waits.
    for expected in 3..20 {
        assert_unavailable(try_add_one(&vault, "newcomer"));
        let newcomer = vault.update_async(&key("newcomer"), add);
        assert_unavailable(single_threaded().block_on(newcomer));
        for client in &known {
            assert_eq!(add_one(&vault, client), expected);
        }
    }
    assert_unavailable(vault.flush());

    storage.fail(false);
    eventually("it is well", || vault.flush().is_ok());
    assert_eq!(add_one(&vault, "newcomer"), 1);
    for client in &clients {
        let expected = if known.contains(&client) { 19 } else { 1 };
        assert_eq!(vault.get(&key(client)).unwrap(), Some(Number(expected)));
    }
    vault.close().unwrap();
    let image = super::after_power_cut(&storage).open().unwrap();
    assert_eq!(rows(&image).len(), clients.len() + 1);
    assert_eq!(on_disk(&storage, known[0]), Some(Number(19)));
}

#[test]
fn with_room_for_nothing_every_caller_is_served_by_the_flush() {
    let storage = Arc::new(Faulty::default());
    let vault = buffered(&storage).cache_bytes(0).buffer_bytes(0);
    let vault = vault.open().unwrap();
    let clients = clients(10 * most_shards());
    for round in 1..=3 {
        for client in &clients {
            assert_eq!(add_one(&vault, client), round);
        }
    }
    assert!(vault.stats().unwrap().flushes > 0);
    vault.flush().unwrap();
    let held = in_memory(&vault, &storage, &clients);
    assert!(held <= most_rows(0), "{held}");
}

#[test]
fn callers_wait_for_a_slow_disk_and_memory_stays_within_the_bound() {
    const THREADS: usize = 64;
    const KEYS: usize = 20;
    let storage = Arc::new(Faulty::default());
    let vault = buffered(&storage).cache_bytes(0).buffer_bytes(1);
    let vault = vault.open().unwrap();
    let clients: Vec<_> = clients(THREADS * KEYS * most_shards() / 16);
    let done = AtomicUsize::new(0);
    storage.hold(true);
    thread::scope(|scope| {
        for clients in clients.chunks(clients.len() / THREADS) {
            let (vault, done) = (&vault, &done);
            scope.spawn(move || {
                for client in clients {
                    assert_eq!(add_one(vault, client), 1);
                    done.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        // The flush begins at once, although an hour has not passed.
        storage.until_a_sync_waits();
        let letting_go = super::LettingGo(&storage);
        give_way();
        // One row of each thread may be taken in before the writer comes to flush.
        let taken_in = done.load(Ordering::SeqCst);
        assert!(taken_in <= most_rows(1) + 3 * THREADS, "{taken_in}");
        drop(letting_go);
    });
    assert_eq!(done.into_inner(), clients.len());
    vault.flush().unwrap();
    assert_eq!(vault.len().unwrap(), clients.len() as u64);
    let held = in_memory(&vault, &storage, &clients);
    assert!(held <= most_rows(1) + THREADS, "{held}");
}

#[test]
fn tasks_await_a_slow_disk_and_the_runtime_goes_on() {
    let storage = Arc::new(Faulty::default());
    let vault = buffered(&storage).buffer_bytes(1).open().unwrap();
    let clients = clients(3_000);
    let tasks = tokio::task::LocalSet::new();
    storage.hold(true);
    for client in &clients {
        let update = vault.update_async(&key(client), add);
        tasks.spawn_local(async move { assert_eq!(update.await.unwrap(), 1) });
    }
    let progress = single_threaded().block_on(tasks.run_until(async {
        let mut progress = 0;
        while progress < 1_000 {
            progress += 1;
            tokio::task::yield_now().await;
        }
        storage.until_a_sync_waits();
        storage.hold(false);
        progress
    }));
    assert_eq!(progress, 1_000);
    single_threaded().block_on(tasks);
    vault.flush().unwrap();
    assert_eq!(vault.len().unwrap(), 3_000);
}

/// A row that says what it holds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Text(String);

impl Row for Text {
    const KIND: &'static str = "text/1";

    fn memory(&self) -> usize {
        self.0.capacity()
    }
}

#[test]
fn large_rows_leave_room_for_few() {
    const LENGTH: usize = 50_000;
    let storage = Arc::new(Faulty::default());
    let vault = Vault::<Text>::builder("texts").storage(Arc::clone(&storage));
    let vault = vault
        .durability(RARELY)
        .cache_bytes(0)
        .buffer_bytes(4 * LENGTH);
    let vault = vault.open().unwrap();
    let clients = clients(8 * most_shards());
    for client in &clients {
        vault
            .put(&key(client), Text("x".repeat(LENGTH)), MINUTE)
            .unwrap();
    }
    vault.flush().unwrap();
    // One too many in each part.
    let held = in_memory(&vault, &storage, &clients);
    assert!(held <= 4 + most_shards(), "{held}");
}

#[test]
fn rows_that_grow_in_memory_stay_within_the_bound_too() {
    const LENGTH: usize = 50_000;
    let storage = Arc::new(Faulty::default());
    let vault = Vault::<Text>::builder("texts").storage(Arc::clone(&storage));
    let bytes = 1_000 * most_shards();
    let vault = vault.durability(RARELY).cache_bytes(0).buffer_bytes(bytes);
    let vault = vault.open().unwrap();
    let clients = clients(8 * most_shards());
    for length in [1, LENGTH] {
        for client in &clients {
            vault
                .put(&key(client), Text("x".repeat(length)), MINUTE)
                .unwrap();
        }
    }
    vault.flush().unwrap();
    let held = in_memory(&vault, &storage, &clients);
    assert!(held <= bytes / LENGTH + most_shards(), "{held}");
}
