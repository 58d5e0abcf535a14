//! Rows of silent clients leave the file on their own, and an expired row is seen by nobody.

use std::sync::Arc;
use std::time::Duration;

use ratevault::{Clock, HitLog, Limiter, Quota, SlidingWindow, Timestamp, Vault};

use crate::support::faulty::Faulty;
use crate::support::file::Contents;
use crate::support::{
    DAY, MINUTE, Number, SECOND, START, eventually, key, manual_clock, single_threaded,
};

#[test]
fn a_silent_row_leaves_the_file_without_any_further_call() {
    let clock = manual_clock();
    let vault: Vault<HitLog> = Vault::builder("rate_limits")
        .in_memory()
        .clock(clock.clone())
        .open()
        .unwrap();
    let limiter = Limiter::new(
        vault,
        SlidingWindow::new(Quota::per_minute(1).unwrap()).unwrap(),
    );
    assert!(limiter.check("login", "ada").unwrap().is_allowed());
    assert!(!limiter.check("login", "ada").unwrap().is_allowed());
    clock.advance(MINUTE);
    assert!(
        limiter.check("login", "ada").unwrap().is_allowed(),
        "after the window"
    );
    clock.advance(2 * MINUTE);
    eventually("the row leaves", || limiter.vault().is_empty().unwrap());
    eventually("it is counted", || {
        limiter.vault().stats().unwrap().swept == 1
    });
}

#[test]
fn so_it_does_by_the_system_clock() {
    let vault: Vault<HitLog> = Vault::builder("rate_limits").in_memory().open().unwrap();
    let quota = Quota::new(1, Duration::from_millis(1)).unwrap();
    let limiter = Limiter::new(vault, SlidingWindow::new(quota).unwrap());
    limiter.check("login", "ada").unwrap();
    assert_eq!(limiter.vault().len().unwrap(), 1);
    eventually("the row leaves", || limiter.vault().is_empty().unwrap());
}

#[test]
fn an_idle_vault_without_due_rows_touches_nothing() {
    let storage = Arc::new(Faulty::default());
    let clock = manual_clock();
    let builder = Vault::<Number>::builder("numbers").storage(Arc::clone(&storage));
    let vault = builder.clock(clock.clone()).open().unwrap();
    vault.put(&key("a"), Number(1), DAY).unwrap();
    let syncs = storage.syncs();
    for _ in 0..100 {
        clock.advance(MINUTE);
        vault.flush().unwrap();
    }
    assert_eq!(storage.syncs(), syncs);
}

#[test]
fn a_callers_batch_takes_due_rows_along() {
    let storage = Arc::new(Faulty::default());
    let clock = manual_clock();
    let builder = Vault::<Number>::builder("numbers").storage(Arc::clone(&storage));
    let vault = builder.clock(clock.clone()).open().unwrap();
    for client in 0..100 {
        vault
            .put(&key(&client.to_string()), Number(client), SECOND)
            .unwrap();
    }
    // The writer is busy when the rows come due.
    storage.hold(true);
    let busy = vault.update_async(&key("busy"), |slot| slot.put(Number(0), DAY));
    storage.until_a_sync_waits();
    clock.advance(MINUTE);
    let next = vault.update_async(&key("next"), |slot| slot.put(Number(0), DAY));
    storage.hold(false);
    let runtime = single_threaded();
    runtime.block_on(busy).unwrap();
    runtime.block_on(next).unwrap();
    assert_eq!(vault.len().unwrap(), 2);
}

#[test]
fn an_expired_row_is_invisible_swept_or_not() {
    let clock = manual_clock();
    let builder = Vault::<Number>::builder("numbers")
        .in_memory()
        .clock(clock.clone());
    let vault = builder.background_sweep(false).open().unwrap();
    vault.put(&key("a"), Number(1), MINUTE).unwrap();
    clock.advance(MINUTE - Duration::from_millis(1));
    assert!(vault.get(&key("a")).unwrap().is_some());
    clock.advance(Duration::from_millis(1));
    assert_eq!(vault.get(&key("a")).unwrap(), None);
    assert_eq!(vault.scan().count(), 0);
    assert_eq!(
        vault
            .update(&key("a"), |slot| slot.value().copied())
            .unwrap(),
        None
    );
    assert_eq!(vault.len().unwrap(), 1, "the sweep has not been");
    assert!(!vault.remove(&key("a")).unwrap(), "nothing live was there");
    assert_eq!(vault.len().unwrap(), 0);
}

#[test]
fn a_sweep_leaves_what_was_renewed() {
    let clock = manual_clock();
    let builder = Vault::<Number>::builder("numbers")
        .in_memory()
        .clock(clock.clone());
    let vault = builder.background_sweep(false).open().unwrap();
    for client in 0..2_500 {
        drop(vault.update_async(&key(&client.to_string()), |slot| {
            slot.put(Number(1), MINUTE)
        }));
    }
    vault.flush().unwrap();
    clock.advance(30 * SECOND);
    for client in 0..1_200 {
        drop(vault.update_async(&key(&client.to_string()), |slot| {
            slot.put(Number(2), MINUTE)
        }));
    }
    vault.flush().unwrap();
    clock.advance(31 * SECOND);
    assert_eq!(vault.sweep().unwrap(), 1_300);
    assert_eq!(
        vault
            .scan()
            .filter(|row| row.as_ref().unwrap().value == Number(2))
            .count(),
        1_200
    );
    clock.advance(30 * SECOND);
    assert_eq!(vault.sweep().unwrap(), 1_200);
    assert_eq!(vault.len().unwrap(), 0);
}

#[test]
fn the_space_of_swept_rows_is_reused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vault.redb");
    let clock = manual_clock();
    let builder = Vault::<Number>::builder("numbers")
        .path(&path)
        .clock(clock.clone());
    let vault = builder.background_sweep(false).open().unwrap();
    let mut sizes = Vec::new();
    for round in 0..12_u64 {
        for client in 0..3_000 {
            let key = key(&format!("{round} {client}"));
            drop(vault.update_async(&key, |slot| slot.put(Number(1), MINUTE)));
        }
        vault.flush().unwrap();
        clock.advance(2 * MINUTE);
        assert_eq!(vault.sweep().unwrap(), 3_000);
        sizes.push(path.metadata().unwrap().len());
    }
    // Twelve rounds take no more than a few do.
    assert!(sizes[11] <= 2 * sizes[2], "{sizes:?}");
}

#[test]
fn rows_from_a_clock_that_ran_ahead_are_dated_back() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vault.redb");
    let clock = manual_clock();
    clock.advance(365 * DAY);
    let open = |sweep| {
        let builder = Vault::<Number>::builder("numbers")
            .path(&path)
            .clock(clock.clone());
        builder.background_sweep(sweep).open().unwrap()
    };
    let vault = open(true);
    for client in 0..5 {
        vault
            .put(&key(&client.to_string()), Number(client), MINUTE)
            .unwrap();
    }
    clock.set(Timestamp::from_millis(START));
    // Nothing was filed ahead once the writer has looked.
    let redated = clock.now().saturating_add(MINUTE);
    eventually("they are dated back", || {
        vault.scan().all(|row| row.unwrap().expires_at == redated)
    });
    vault.close().unwrap();
    Contents::read(&path, "numbers").check_invariant();
    clock.advance(MINUTE);
    let vault = open(false);
    assert_eq!(vault.sweep().unwrap(), 5);
}
