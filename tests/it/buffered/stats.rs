//! What `stats` tells of a buffered table, and how it gets well again.

use std::sync::Arc;
use std::time::Duration;

use ratevault::{Durability, Error, Vault};

use super::{add_one, buffered, on_disk};
use crate::support::faulty::Faulty;
use crate::support::{MINUTE, Number, eventually, key, manual_clock};

#[test]
fn flushes_and_their_rows_are_counted() {
    let vault = buffered(&Arc::new(Faulty::default())).open().unwrap();
    let counts = || {
        let stats = vault.stats().unwrap();
        (stats.flushes, stats.rows_flushed, stats.rows)
    };
    assert_eq!(counts(), (0, 0, 0));
    for client in ["ada", "bob", "eve", "ada"] {
        add_one(&vault, client);
    }
    assert_eq!(counts(), (0, 0, 0));
    vault.flush().unwrap();
    assert_eq!(counts(), (1, 3, 3));
    // Nothing to carry is no flush.
    vault.flush().unwrap();
    assert_eq!(counts(), (1, 3, 3));
    vault.remove(&key("ada")).unwrap();
    vault.flush().unwrap();
    assert_eq!(counts(), (2, 4, 2));
}

#[test]
fn a_flush_of_many_rows_is_one_flush() {
    let vault = buffered(&Arc::new(Faulty::default())).open().unwrap();
    for client in 0..10_001 {
        add_one(&vault, &client.to_string());
    }
    vault.flush().unwrap();
    let stats = vault.stats().unwrap();
    assert_eq!(
        (stats.flushes, stats.rows_flushed, stats.rows),
        (1, 10_001, 10_001)
    );
}

#[test]
fn a_row_that_two_flushes_wanted_is_counted_once() {
    let storage = Arc::new(Faulty::default());
    let vault = buffered(&storage).open().unwrap();
    let hasty = buffered(&storage).answer_timeout(Duration::ZERO).open();
    let hasty = hasty.unwrap();
    let committed = Vault::<Number>::builder("committed").storage(Arc::clone(&storage));
    let committed = committed.open().unwrap();
    add_one(&vault, "ada");
    storage.hold(true);
    drop(committed.update_async(&key("busy"), |slot| slot.put(Number(0), MINUTE)));
    storage.until_a_sync_waits();
    for _ in 0..2 {
        let error = hasty.flush().unwrap_err();
        assert!(matches!(error, Error::Unavailable { .. }), "{error:?}");
    }
    storage.hold(false);
    vault.flush().unwrap();
    assert_eq!(vault.stats().unwrap().rows_flushed, 1);
    assert_eq!(vault.stats().unwrap().oldest_unflushed, None);
}

#[test]
fn the_oldest_change_is_as_old_as_the_first_since_the_flush_that_carried_the_rest() {
    let storage = Arc::new(Faulty::default());
    let vault = buffered(&storage).open().unwrap();
    let oldest = || vault.stats().unwrap().oldest_unflushed;
    assert_eq!(oldest(), None);
    add_one(&vault, "ada");
    let first = oldest().unwrap();
    add_one(&vault, "bob");
    assert!(oldest().unwrap() >= first, "a younger change is no excuse");
    super::while_in_flight(&storage, &vault, || {
        assert!(oldest().unwrap() >= first, "in flight is not on disk");
    });
    assert_eq!(oldest(), None);
    // Reading, and refusing to change, is no change.
    vault.get(&key("ada")).unwrap();
    vault.update(&key("ada"), |slot| slot.take()).unwrap();
    assert_eq!(oldest(), None);
}

#[test]
fn a_disk_that_fails_is_told_of_while_it_fails() {
    let storage = Arc::new(Faulty::default());
    let vault = buffered(&storage).open().unwrap();
    add_one(&vault, "ada");
    storage.fail(true);
    vault.flush().unwrap_err();
    let stats = vault.stats().unwrap();
    let error = stats.last_flush_error.unwrap().to_string();
    assert!(error.contains("injected"), "{error}");
    assert!(stats.oldest_unflushed.is_some());
    assert_eq!((stats.flushes, stats.rows_flushed), (0, 0));
    storage.fail(false);
    eventually("it is well", || vault.flush().is_ok());
    let stats = vault.stats().unwrap();
    assert!(stats.last_flush_error.is_none());
    assert_eq!(stats.oldest_unflushed, None);
    assert_eq!((stats.flushes, stats.rows_flushed), (1, 1));
}

#[test]
fn a_disk_that_is_well_again_is_flushed_to_without_any_further_call() {
    let storage = Arc::new(Faulty::default());
    let vault = Vault::<Number>::builder("numbers").storage(Arc::clone(&storage));
    let flush_every = Duration::from_millis(5);
    let vault = vault.durability(Durability::Buffered { flush_every });
    let vault = vault.clock(manual_clock()).open().unwrap();
    add_one(&vault, "ada");
    eventually("it is loaded and flushed", || {
        vault.stats().is_ok_and(|stats| stats.flushes == 1)
    });
    storage.fail(true);
    assert_eq!(add_one(&vault, "ada"), 2);
    eventually("a flush has failed", || {
        vault.get(&key("stranger")).is_err()
    });
    // Decisions on what is in memory go on.
    assert_eq!(add_one(&vault, "ada"), 3);
    storage.fail(false);
    let is_well = || {
        vault
            .stats()
            .is_ok_and(|stats| stats.oldest_unflushed.is_none())
    };
    eventually("all is on disk", is_well);
    assert!(vault.stats().unwrap().last_flush_error.is_none());
    assert_eq!(vault.len().unwrap(), 1);
    let image = super::after_power_cut(&storage)
        .clock(manual_clock())
        .open()
        .unwrap();
    assert_eq!(image.get(&key("ada")).unwrap(), Some(Number(3)));
}

#[test]
fn a_disk_that_fails_before_any_flush_was_tried_is_told_of_too() {
    let storage = Arc::new(Faulty::default());
    let vault = buffered(&storage).open().unwrap();
    let committed = Vault::<Number>::builder("committed").storage(Arc::clone(&storage));
    let committed = committed.open().unwrap();
    storage.fail(true);
    committed.put(&key("bob"), Number(1), MINUTE).unwrap_err();
    // Nothing waits for it yet.
    assert!(vault.stats().unwrap().last_flush_error.is_none());
    storage.fail(false);
    eventually("ada is in memory", || {
        vault.update(&key("ada"), super::add).is_ok()
    });
    storage.fail(true);
    committed.put(&key("bob"), Number(1), MINUTE).unwrap_err();
    let error = vault.stats().unwrap().last_flush_error.unwrap().to_string();
    assert!(error.contains("injected"), "{error}");
    storage.fail(false);
    eventually("it is well", || vault.flush().is_ok());
    assert!(vault.stats().unwrap().last_flush_error.is_none());
}

#[test]
fn a_committed_table_has_no_flushes() {
    let vault = Vault::<Number>::builder("numbers")
        .in_memory()
        .open()
        .unwrap();
    add_one(&vault, "ada");
    vault.flush().unwrap();
    let stats = vault.stats().unwrap();
    assert_eq!(
        (stats.flushes, stats.rows_flushed, stats.oldest_unflushed),
        (0, 0, None)
    );
    assert!(stats.last_flush_error.is_none());
}

#[test]
fn a_flush_that_failed_is_made_up_for_by_closing() {
    let storage = Arc::new(Faulty::default());
    let vault = buffered(&storage).open().unwrap();
    add_one(&vault, "ada");
    storage.fail(true);
    vault.flush().unwrap_err();
    storage.fail(false);
    eventually("it is open again", || vault.get(&key("stranger")).is_ok());
    vault.close().unwrap();
    assert_eq!(on_disk(&storage, "ada"), Some(Number(1)));
}
