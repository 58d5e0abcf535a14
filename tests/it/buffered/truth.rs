//! One truth: whoever asks finds the newest row, be it in memory, on its way, or in the file.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use ratevault::{
    Clock, Error, HitLog, Limiter, ManualClock, Quota, SlidingWindow, Timestamp, Vault,
    VaultBuilder,
};

use super::{
    RARELY, add, add_one, after_power_cut, buffered, give_way, on_disk, rows, while_in_flight,
};
use crate::support::faulty::Faulty;
use crate::support::{
    DAY, MINUTE, Number, SECOND, START, eventually, key, manual_clock, single_threaded,
};

fn number(client: &str, number: u64) -> (String, Number) {
    (client.into(), Number(number))
}

/// A buffered table by a clock of ours, that nobody sweeps but we.
fn table(storage: &Arc<Faulty>, clock: &Arc<ManualClock>) -> VaultBuilder<Number> {
    let builder = buffered(storage).clock(Arc::clone(clock) as _);
    builder.background_sweep(false)
}

fn put(vault: &Vault<Number>, client: &str, value: u64, ttl: Duration) {
    vault.put(&key(client), Number(value), ttl).unwrap();
}

fn get(vault: &Vault<Number>, client: &str) -> Option<u64> {
    vault
        .get(&key(client))
        .unwrap()
        .map(|Number(number)| number)
}

// In flight.

#[test]
fn updates_go_on_while_the_flush_waits_for_the_disk() {
    let storage = Arc::new(Faulty::default());
    let vault = buffered(&storage).open().unwrap();
    for client in ["ada", "bob", "eve"] {
        add_one(&vault, client);
    }
    while_in_flight(&storage, &vault, || {
        assert_eq!(add_one(&vault, "ada"), 2);
        assert!(vault.remove(&key("bob")).unwrap());
        put(&vault, "eve", 9, MINUTE);
        assert_eq!(get(&vault, "ada"), Some(2));
        assert_eq!(get(&vault, "bob"), None);
        assert_eq!(get(&vault, "eve"), Some(9));
    });
    // The flush carried what was there when it began, and nobody lost what came meanwhile.
    assert_eq!(on_disk(&storage, "ada"), Some(Number(1)));
    assert_eq!(on_disk(&storage, "bob"), Some(Number(1)));
    assert_eq!(rows(&vault), [number("ada", 2), number("eve", 9)]);
    assert_eq!(on_disk(&storage, "bob"), None);
    assert_eq!(add_one(&vault, "bob"), 1);
}

#[test]
fn a_panic_while_the_row_is_in_flight_changes_nothing() {
    let storage = Arc::new(Faulty::default());
    let vault = buffered(&storage).open().unwrap();
    add_one(&vault, "ada");
    while_in_flight(&storage, &vault, || {
        let panicking = vault.update_async(&key("ada"), |slot| {
            slot.remove();
            panic!("mine");
        });
        let awaiting = || single_threaded().block_on(panicking);
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(awaiting)).unwrap_err();
        assert_eq!(get(&vault, "ada"), Some(1));
    });
    assert_eq!(rows(&vault), [number("ada", 1)]);
}

#[test]
fn a_limiter_counts_and_peeks_while_the_flush_waits_for_the_disk() {
    let storage = Arc::new(Faulty::default());
    let vault = Vault::<HitLog>::builder("limits").storage(Arc::clone(&storage));
    let vault = vault.durability(RARELY).open().unwrap();
    let window = SlidingWindow::new(Quota::per_hour(3).unwrap()).unwrap();
    let limiter = Limiter::new(vault, window);
    let left = || limiter.peek("login", "ada").unwrap().remaining();
    limiter.check("login", "ada").unwrap();
    assert_eq!(left(), 2, "only in memory");
    thread::scope(|scope| {
        storage.hold(true);
        let flush = scope.spawn(|| limiter.vault().flush());
        storage.until_a_sync_waits();
        let letting_go = super::LettingGo(&storage);
        assert_eq!(left(), 2, "in flight");
        let check = limiter.check_async("login", "ada");
        assert_eq!(single_threaded().block_on(check).unwrap().remaining(), 1);
        drop(letting_go);
        flush.join().unwrap().unwrap();
    });
    assert_eq!(left(), 1, "in the file, and newer in memory");
    limiter.reset("login", "ada").unwrap();
    assert_eq!(left(), 3);
    limiter.check("login", "ada").unwrap();
    limiter.check("login", "bob").unwrap();
    assert_eq!(limiter.reset_endpoint("login").unwrap(), 2);
    assert_eq!(left(), 3);
}

#[test]
fn a_scan_finds_what_is_in_flight() {
    let storage = Arc::new(Faulty::default());
    let vault = buffered(&storage).open().unwrap();
    add_one(&vault, "ada");
    let found = thread::scope(|scope| {
        let scan = while_in_flight(&storage, &vault, || {
            let scan = scope.spawn(|| rows(&vault));
            give_way();
            scan
        });
        scan.join().unwrap()
    });
    assert_eq!(found, [number("ada", 1)]);
}

#[test]
fn what_is_in_flight_is_removed_with_its_endpoint() {
    let storage = Arc::new(Faulty::default());
    let vault = buffered(&storage).open().unwrap();
    add_one(&vault, "ada");
    let removed = thread::scope(|scope| {
        let removing = while_in_flight(&storage, &vault, || {
            let removing = scope.spawn(|| vault.remove_endpoint("test").unwrap());
            give_way();
            removing
        });
        removing.join().unwrap()
    });
    assert_eq!(removed, 1);
    assert_eq!(get(&vault, "ada"), None);
    assert_eq!(rows(&vault), []);
    assert_eq!(add_one(&vault, "ada"), 1);
}

#[test]
fn a_flush_waits_for_what_is_in_flight() {
    let storage = Arc::new(Faulty::default());
    let vault = buffered(&storage).open().unwrap();
    add_one(&vault, "ada");
    let found = thread::scope(|scope| {
        let second = while_in_flight(&storage, &vault, || {
            let second = scope.spawn(|| {
                vault.flush().unwrap();
                on_disk(&storage, "ada")
            });
            give_way();
            second
        });
        second.join().unwrap()
    });
    assert_eq!(found, Some(Number(1)));
}

#[test]
fn a_flush_carries_updates_that_were_queued_before_it() {
    let storage = Arc::new(Faulty::default());
    let vault = buffered(&storage).open().unwrap();
    let committed = Vault::<Number>::builder("committed").storage(Arc::clone(&storage));
    let committed = committed.open().unwrap();
    // The writer is busy, and the key is not in memory: the update has to wait in the queue.
    storage.hold(true);
    let busy = committed.update_async(&key("busy"), |slot| slot.put(Number(0), MINUTE));
    storage.until_a_sync_waits();
    let queued = vault.update_async(&key("ada"), add);
    thread::scope(|scope| {
        let flush = scope.spawn(|| vault.flush());
        give_way();
        storage.hold(false);
        flush.join().unwrap().unwrap();
    });
    assert_eq!(on_disk(&storage, "ada"), Some(Number(1)));
    let runtime = single_threaded();
    assert_eq!(runtime.block_on(queued).unwrap(), 1);
    runtime.block_on(busy).unwrap();
}

#[test]
fn an_async_update_that_was_not_applied_is_not_in_memory_either() {
    for reads in 0..40 {
        let storage = Arc::new(Faulty::default());
        let vault = buffered(&storage).cache_bytes(0).open().unwrap();
        // Makes the first look into the rows a real one.
        for client in 0..50 {
            put(&vault, &client.to_string(), 1, MINUTE);
        }
        vault.flush().unwrap();
        storage.fail_after_reads(reads);
        let answer = single_threaded().block_on(vault.update_async(&key("ada"), add));
        storage.fail(false);
        eventually("service resumes", || vault.get(&key("other")).is_ok());
        let found = get(&vault, "ada");
        match answer {
            Ok(_) => assert_eq!(found, Some(1), "{reads}"),
            Err(Error::Unavailable {
                applied: ratevault::Applied::No,
                ..
            }) => {
                assert_eq!(found, None, "{reads}");
            }
            Err(Error::Unavailable { .. }) => {}
            Err(error) => panic!("{error:?}"),
        }
    }
}

// The sweep.

#[test]
fn a_row_that_was_renewed_in_memory_survives_the_sweep_of_its_copy() {
    let (storage, clock) = (Arc::new(Faulty::default()), manual_clock());
    let vault = buffered(&storage).clock(clock.clone()).open().unwrap();
    let other = Vault::<Number>::builder("others").storage(Arc::clone(&storage));
    let other = other.open().unwrap();
    put(&vault, "ada", 1, MINUTE);
    put(&vault, "bob", 1, MINUTE);
    vault.flush().unwrap();
    clock.advance(30 * SECOND);
    put(&vault, "ada", 2, MINUTE);
    // In the file both have expired.
    clock.advance(45 * SECOND);
    eventually("the background sweep", || {
        put(&other, "any", 1, MINUTE);
        vault.stats().unwrap().swept == 1
    });
    assert_eq!(get(&vault, "ada"), Some(2));
    assert_eq!(get(&vault, "bob"), None);
    assert_eq!(add_one(&vault, "ada"), 3);
    vault.flush().unwrap();
    assert_eq!(vault.stats().unwrap().swept, 1);
    let image = after_power_cut(&storage)
        .clock(clock.clone())
        .open()
        .unwrap();
    assert_eq!(rows(&image), [number("ada", 3)]);
}

#[test]
fn a_row_that_is_renewed_in_flight_survives_the_sweep() {
    let (storage, clock) = (Arc::new(Faulty::default()), manual_clock());
    let vault = table(&storage, &clock).open().unwrap();
    put(&vault, "ada", 1, MINUTE);
    vault.flush().unwrap();
    put(&vault, "ada", 2, MINUTE);
    thread::scope(|scope| {
        let sweep = while_in_flight(&storage, &vault, || {
            clock.advance(30 * SECOND);
            put(&vault, "ada", 3, MINUTE);
            clock.advance(45 * SECOND);
            let sweep = scope.spawn(|| vault.sweep());
            give_way();
            sweep
        });
        assert_eq!(sweep.join().unwrap().unwrap(), 0);
    });
    assert_eq!(get(&vault, "ada"), Some(3));
    assert_eq!(rows(&vault), [number("ada", 3)]);
}

#[test]
fn a_sweep_ends_although_rows_that_are_due_wait_for_a_flush() {
    let (storage, clock) = (Arc::new(Faulty::default()), manual_clock());
    let vault = table(&storage, &clock).open().unwrap();
    let clients: Vec<_> = (0..1_500).map(|client: u64| client.to_string()).collect();
    clients
        .iter()
        .for_each(|client| put(&vault, client, 1, MINUTE));
    vault.flush().unwrap();
    clock.advance(2 * MINUTE);
    put(&vault, "one more", 1, MINUTE);
    // They become dirty after the sweep's own flush has begun, and before it looks.
    storage.hold(true);
    let done = Arc::new(());
    let sweeping = {
        let (vault, done) = (vault.clone(), Arc::clone(&done));
        thread::spawn(move || {
            let swept = vault.sweep().unwrap();
            drop(done);
            swept
        })
    };
    storage.until_a_sync_waits();
    clients
        .iter()
        .for_each(|client| put(&vault, client, 2, MINUTE));
    storage.hold(false);
    eventually("the sweep ends", || Arc::strong_count(&done) == 1);
    assert_eq!(sweeping.join().unwrap(), 0);
    assert_eq!(rows(&vault).len(), 1_501);
}

#[test]
fn a_row_that_is_dated_back_is_so_in_memory_too() {
    let (storage, clock) = (Arc::new(Faulty::default()), manual_clock());
    let vault = table(&storage, &clock).open().unwrap();
    clock.advance(365 * DAY);
    put(&vault, "ada", 1, MINUTE);
    clock.set(Timestamp::from_millis(START));
    vault.sweep().unwrap();
    let ends = vault.scan().map(|row| row.unwrap().expires_at);
    let in_a_minute = clock.now().saturating_add(MINUTE);
    assert_eq!(ends.collect::<Vec<_>>(), [in_a_minute]);
    clock.advance(MINUTE);
    assert_eq!(rows(&vault), []);
    assert_eq!(
        get(&vault, "ada"),
        None,
        "what is in memory is what is in the file"
    );
}

#[test]
fn a_row_that_expired_in_memory_leaves_nothing_in_the_file() {
    let (storage, clock) = (Arc::new(Faulty::default()), manual_clock());
    let vault = table(&storage, &clock).open().unwrap();
    put(&vault, "ada", 1, SECOND);
    put(&vault, "bob", 1, MINUTE);
    vault.flush().unwrap();
    put(&vault, "ada", 2, SECOND);
    put(&vault, "eve", 2, SECOND);
    clock.advance(2 * SECOND);
    assert_eq!(get(&vault, "ada"), None);
    vault.flush().unwrap();
    assert_eq!(vault.len().unwrap(), 1);
    assert_eq!(rows(&vault), [number("bob", 1)]);
    assert_eq!(add_one(&vault, "ada"), 1);
}

// The bound.

/// What is in memory, by asking for each, is what is in the file.
fn assert_one_truth(vault: &Vault<Number>, clients: impl Iterator<Item = u64>) {
    let clients = clients.map(|client| format!("{client:03}"));
    let asked = clients.filter(|client| vault.get(&key(client)).unwrap().is_some());
    let asked: Vec<_> = asked.collect();
    let scanned: Vec<_> = rows(vault).into_iter().map(|(client, _)| client).collect();
    assert_eq!(asked, scanned);
}

#[test]
fn a_flush_keeps_the_table_within_its_bound() {
    let (storage, clock) = (Arc::new(Faulty::default()), manual_clock());
    let vault = table(&storage, &clock).max_keys(10).open().unwrap();
    for flush in 0..5 {
        for client in 0..7 {
            clock.advance(SECOND);
            put(&vault, &format!("{:03}", flush * 7 + client), client, DAY);
        }
        assert!(vault.len().unwrap() <= 10);
        vault.flush().unwrap();
        assert!(vault.len().unwrap() <= 10);
    }
    assert_eq!(vault.stats().unwrap().evicted, 25);
    assert_one_truth(&vault, 0..35);
    // The newest are among those that stayed.
    for client in 28..35 {
        assert!(get(&vault, &format!("{client:03}")).is_some(), "{client}");
    }
}

#[test]
fn a_row_that_the_bound_takes_within_its_own_flush_is_forgotten_in_memory_too() {
    let (storage, clock) = (Arc::new(Faulty::default()), manual_clock());
    let vault = table(&storage, &clock).max_keys(10).open().unwrap();
    for client in 0..40 {
        clock.advance(SECOND);
        put(&vault, &format!("{client:03}"), client, DAY);
    }
    vault.flush().unwrap();
    assert_eq!(vault.len().unwrap(), 10);
    assert_one_truth(&vault, 0..40);
}

#[test]
fn a_row_that_the_bound_takes_from_the_file_but_is_newer_in_memory_stays() {
    let (storage, clock) = (Arc::new(Faulty::default()), manual_clock());
    let vault = table(&storage, &clock).max_keys(3).open().unwrap();
    for client in ["x", "y", "z"] {
        clock.advance(SECOND);
        put(&vault, client, 1, DAY);
    }
    vault.flush().unwrap();
    // Newcomers that are written first displace the oldest, whose newer value comes after them.
    for client in ["x", "a", "b"] {
        clock.advance(SECOND);
        put(&vault, client, 2, DAY);
    }
    vault.flush().unwrap();
    assert_eq!(vault.len().unwrap(), 3);
    assert_eq!(get(&vault, "x"), Some(2));
    assert!(rows(&vault).contains(&number("x", 2)));
}

#[test]
fn the_length_is_the_files() {
    let storage = Arc::new(Faulty::default());
    let vault = buffered(&storage).open().unwrap();
    add_one(&vault, "ada");
    assert_eq!(vault.len().unwrap(), 0);
    assert!(vault.is_empty().unwrap());
    vault.flush().unwrap();
    assert_eq!(vault.len().unwrap(), 1);
    vault.remove(&key("ada")).unwrap();
    assert_eq!(vault.len().unwrap(), 1);
    assert_eq!(rows(&vault), []);
    assert_eq!(vault.len().unwrap(), 0);
}
