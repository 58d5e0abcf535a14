//! A buffered table: decided in memory, carried to the file by flushes.

mod errors;
mod full;
#[cfg(feature = "axum")]
mod http;
mod limits;
mod model;
mod settings;
mod stats;
mod truth;

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use ratevault::{Durability, Limiter, Quota, Row, SlidingWindow, Storage, Vault, VaultBuilder};

use crate::support::faulty::Faulty;
use crate::support::{MINUTE, Number, eventually, key, manual_clock, single_threaded};

const HOUR: Duration = Duration::from_secs(3_600);

/// A buffered table that flushes only when it is asked to, or is full.
fn buffered<S: Storage>(storage: &Arc<S>) -> VaultBuilder<Number> {
    Vault::builder("numbers")
        .storage(Arc::clone(storage))
        .durability(RARELY)
}

/// A durability that flushes only when it is asked to, or the memory is full.
const RARELY: Durability = Durability::Buffered { flush_every: HOUR };

/// What a power cut would leave.
fn after_power_cut(storage: &Faulty) -> VaultBuilder<Number> {
    let image = Arc::new(Faulty::with_image(storage.durable_image()));
    Vault::builder("numbers").storage(image)
}

/// What a power cut would leave of `key`.
fn on_disk(storage: &Faulty, client: &str) -> Option<Number> {
    let vault = after_power_cut(storage).open().unwrap();
    vault.get(&key(client)).unwrap()
}

fn try_add_one(vault: &Vault<Number>, client: &str) -> ratevault::Result<u64> {
    vault.update(&key(client), add)
}

fn add_one(vault: &Vault<Number>, client: &str) -> u64 {
    try_add_one(vault, client).unwrap()
}

fn add(slot: &mut ratevault::Slot<Number>) -> u64 {
    let next = slot.take().unwrap_or_default().0 + 1;
    slot.put(Number(next), MINUTE);
    next
}

/// What all rows of a table are, by its scan.
fn rows<V: Row>(vault: &Vault<V>) -> Vec<(String, V)> {
    let entries = vault.scan().map(|entry| entry.unwrap());
    let pair = |entry: ratevault::Entry<V>| (entry.key.client().to_string(), entry.value);
    entries.map(pair).collect()
}

/// Runs `meanwhile` while the flush of what is dirty waits for its sync.
fn while_in_flight<T>(storage: &Faulty, vault: &Vault<Number>, meanwhile: impl FnOnce() -> T) -> T {
    thread::scope(|scope| {
        storage.hold(true);
        let flush = scope.spawn(|| vault.flush());
        storage.until_a_sync_waits();
        // A failed assertion must not leave the flush waiting for ever.
        let letting_go = LettingGo(storage);
        let done = meanwhile();
        drop(letting_go);
        flush.join().unwrap().unwrap();
        done
    })
}

struct LettingGo<'s>(&'s Faulty);

impl Drop for LettingGo<'_> {
    fn drop(&mut self) {
        self.0.hold(false);
    }
}

/// Gives other threads the chance to do what they must not do yet.
fn give_way() {
    for _ in 0..2_000 {
        thread::yield_now();
    }
}

/// How many rows a table holds in memory, if nothing is dirty and the storage works.
fn in_memory<V: Row>(vault: &Vault<V>, storage: &Faulty, clients: &[String]) -> usize {
    // Its pages are not cached, so whatever is not in memory is not to be had.
    storage.fail(true);
    let held = clients
        .iter()
        .filter(|client| vault.get(&key(client)).is_ok());
    let held = held.count();
    storage.fail(false);
    held
}

#[test]
fn an_update_is_seen_at_once_and_on_disk_after_a_flush() {
    let storage = Arc::new(Faulty::default());
    let vault = buffered(&storage).open().unwrap();
    assert_eq!(add_one(&vault, "ada"), 1);
    assert_eq!(add_one(&vault, "ada"), 2);
    assert_eq!(vault.get(&key("ada")).unwrap(), Some(Number(2)));
    assert_eq!(on_disk(&storage, "ada"), None);
    assert!(vault.stats().unwrap().oldest_unflushed.is_some());
    vault.flush().unwrap();
    assert_eq!(on_disk(&storage, "ada"), Some(Number(2)));
    assert_eq!(vault.stats().unwrap().oldest_unflushed, None);
}

#[test]
fn close_and_drop_forget_nothing() {
    let storage = Arc::new(Faulty::default());
    let vault = buffered(&storage).open().unwrap();
    add_one(&vault, "ada");
    vault.close().unwrap();
    assert!(vault.get(&key("ada")).is_err());
    let vault = buffered(&storage).open().unwrap();
    assert_eq!(add_one(&vault, "ada"), 2);
    drop(vault);
    assert_eq!(on_disk(&storage, "ada"), Some(Number(2)));
}

#[test]
fn a_flush_comes_on_its_own_and_nothing_dirty_is_no_transaction() {
    let storage = Arc::new(Faulty::default());
    let flush_every = Duration::from_millis(5);
    let vault = Vault::builder("numbers")
        .storage(Arc::clone(&storage))
        .durability(Durability::Buffered { flush_every })
        .open()
        .unwrap();
    let before = storage.syncs();
    vault.flush().unwrap();
    assert_eq!(storage.syncs(), before);
    add_one(&vault, "ada");
    eventually("the flush", || storage.syncs() > before);
    eventually("its end", || {
        vault.stats().unwrap().oldest_unflushed.is_none()
    });
    let before = storage.syncs();
    vault.flush().unwrap();
    assert_eq!(storage.syncs(), before);
}

#[test]
fn a_panicking_closure_leaves_its_row_as_it_was() {
    let vault = buffered(&Arc::new(Faulty::default())).open().unwrap();
    add_one(&vault, "ada");
    let panicking = |slot: &mut ratevault::Slot<Number>| {
        slot.take();
        slot.put(Number(99), MINUTE);
        panic!("mine");
    };
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        vault.update(&key("ada"), panicking)
    }));
    assert!(caught.is_err());
    assert_eq!(vault.get(&key("ada")).unwrap(), Some(Number(1)));
    vault
        .update(&key("ada"), |slot| {
            slot.take();
        })
        .unwrap();
    assert_eq!(add_one(&vault, "ada"), 2);
}

#[test]
fn a_removed_row_is_gone_also_from_the_file() {
    let storage = Arc::new(Faulty::default());
    let vault = buffered(&storage).open().unwrap();
    add_one(&vault, "ada");
    vault.flush().unwrap();
    assert!(vault.remove(&key("ada")).unwrap());
    assert!(!vault.remove(&key("ada")).unwrap());
    assert_eq!(vault.get(&key("ada")).unwrap(), None);
    vault.flush().unwrap();
    assert_eq!(on_disk(&storage, "ada"), None);
    assert_eq!(vault.len().unwrap(), 0);
}

#[test]
fn scan_reset_and_sweep_see_what_is_only_in_memory() {
    let clock = manual_clock();
    let storage = Arc::new(Faulty::default());
    let vault = buffered(&storage).clock(clock.clone()).open().unwrap();
    add_one(&vault, "ada");
    add_one(&vault, "bob");
    let rows: Vec<_> = vault.scan().map(|entry| entry.unwrap().value).collect();
    assert_eq!(rows, [Number(1), Number(1)]);
    add_one(&vault, "ada");
    assert_eq!(vault.remove_endpoint("test").unwrap(), 2);
    assert_eq!(vault.get(&key("ada")).unwrap(), None);
    assert_eq!(add_one(&vault, "ada"), 1);
    clock.advance(2 * MINUTE);
    vault.sweep().unwrap();
    assert_eq!(vault.len().unwrap(), 0);
    assert_eq!(add_one(&vault, "ada"), 1);
}

#[test]
fn an_async_check_of_a_known_key_never_leaves_the_task() {
    let storage = Arc::new(Faulty::default());
    let vault = Vault::builder("rate_limits")
        .storage(Arc::clone(&storage))
        .durability(Durability::Buffered { flush_every: HOUR })
        .open()
        .unwrap();
    let limiter = Limiter::new(
        vault,
        SlidingWindow::new(Quota::per_hour(3).unwrap()).unwrap(),
    );
    single_threaded().block_on(async {
        let mut remaining = Vec::new();
        for _ in 0..4 {
            remaining.push(
                limiter
                    .check_async("login", "ada")
                    .await
                    .unwrap()
                    .remaining(),
            );
        }
        assert_eq!(remaining, [2, 1, 0, 0]);
    });
    storage.hold(true);
    let refused = limiter.check("login", "ada").unwrap();
    assert!(!refused.is_allowed());
    storage.hold(false);
}
