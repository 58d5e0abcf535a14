//! Damaged rows, values that cannot be stored, and what a scan sees.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use ratevault::{Client, Error, Key, Limiter, MemoryStorage, Quota, Row, SlidingWindow, Vault};
use serde::{Deserialize, Serialize};

use crate::support::file::{Contents, damage_row, damage_rows};
use crate::support::{DAY, MINUTE, Number, SECOND, eventually, key, manual_clock};

/// A vault in which the row of "b" is damaged, and "a" and "c" are whole.
fn damaged(path: &Path) -> Vault<Number> {
    let open = || {
        let builder = Vault::<Number>::builder("numbers")
            .path(path)
            .clock(manual_clock());
        builder.background_sweep(false).max_keys(3).open().unwrap()
    };
    let vault = open();
    for (number, client) in ["a", "b", "c"].into_iter().enumerate() {
        vault
            .put(&key(client), Number(number as u64), MINUTE)
            .unwrap();
    }
    vault.close().unwrap();
    let rows = Contents::read(path, "numbers").rows;
    damage_row(path, "numbers", rows.keys().nth(1).unwrap());
    open()
}

fn corrupt<T: std::fmt::Debug>(result: Result<T, Error>) {
    match result {
        Err(Error::CorruptRow {
            table,
            endpoint,
            client,
        }) => {
            assert_eq!((&*table, &*endpoint, &*client), ("numbers", "test", "b"));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_damaged_row_is_an_error_for_its_key_only() {
    let directory = tempfile::tempdir().unwrap();
    let vault = damaged(&directory.path().join("vault.redb"));
    corrupt(vault.get(&key("b")));
    corrupt(
        vault
            .update(&key("b"), |_| panic!("it must not be called"))
            .map(|()| 0),
    );
    assert_eq!(vault.get(&key("a")).unwrap(), Some(Number(0)));
    assert_eq!(vault.get(&key("c")).unwrap(), Some(Number(2)));
    let mut scan = vault.scan();
    assert_eq!(scan.next().unwrap().unwrap().value, Number(0));
    corrupt(scan.next().unwrap());
    assert_eq!(scan.next().unwrap().unwrap().value, Number(2));
    assert!(scan.next().is_none());
}

#[test]
fn a_damaged_row_is_no_fresh_counter_and_the_sweep_leaves_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vault.redb");
    drop(damaged(&path));
    let clock = manual_clock();
    clock.advance(DAY);
    let vault = Vault::<Number>::builder("numbers")
        .path(&path)
        .clock(clock)
        .open()
        .unwrap();
    vault.sweep().unwrap();
    assert_eq!(vault.len().unwrap(), 1);
    corrupt(vault.get(&key("b")));
}

#[test]
fn a_damaged_row_can_be_removed_or_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vault.redb");
    let vault = damaged(&path);
    assert!(vault.remove(&key("b")).unwrap());
    assert_eq!(vault.get(&key("b")).unwrap(), None);
    vault.put(&key("b"), Number(7), MINUTE).unwrap();
    vault.close().unwrap();
    Contents::read(&path, "numbers").check_invariant();

    let path = directory.path().join("other.redb");
    let vault = damaged(&path);
    vault.put(&key("b"), Number(7), DAY).unwrap();
    assert_eq!(vault.get(&key("b")).unwrap(), Some(Number(7)));
    vault.close().unwrap();
    Contents::read(&path, "numbers").check_invariant();

    let path = directory.path().join("third.redb");
    let vault = damaged(&path);
    assert_eq!(vault.remove_endpoint("test").unwrap(), 3);
    vault.close().unwrap();
    Contents::read(&path, "numbers").check_invariant();
}

#[test]
fn a_damaged_row_does_not_keep_newcomers_out() {
    let directory = tempfile::tempdir().unwrap();
    let vault = damaged(&directory.path().join("vault.redb"));
    for client in 0..10_u64 {
        vault
            .put(&key(&client.to_string()), Number(client), MINUTE)
            .unwrap();
        assert_eq!(
            vault.get(&key(&client.to_string())).unwrap(),
            Some(Number(client))
        );
        assert_eq!(vault.len().unwrap(), 3);
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Blob(Vec<u8>);

impl Row for Blob {
    const KIND: &'static str = "blob/1";
}

#[test]
fn a_value_that_is_too_large_is_refused_and_nothing_is_lost() {
    let vault: Vault<Blob> = Vault::builder("blobs").in_memory().open().unwrap();
    vault.put(&key("a"), Blob(vec![1]), MINUTE).unwrap();
    let put = vault.put(&key("a"), Blob(vec![0; 2 << 20]), MINUTE);
    assert!(matches!(put, Err(Error::Encode { .. })), "{put:?}");
    assert_eq!(vault.get(&key("a")).unwrap(), Some(Blob(vec![1])));
}

#[test]
fn a_slot_stages_the_last_of_what_is_left_in_it() {
    let vault: Vault<Number> = Vault::builder("numbers").in_memory().open().unwrap();
    let get = || vault.get(&key("a")).unwrap();
    vault
        .update(&key("a"), |slot| {
            slot.put(Number(1), MINUTE);
            assert_eq!(slot.value(), Some(&Number(1)));
            slot.put(Number(2), MINUTE);
        })
        .unwrap();
    assert_eq!(get(), Some(Number(2)));
    vault
        .update(&key("a"), |slot| assert_eq!(slot.take(), Some(Number(2))))
        .unwrap();
    assert_eq!(get(), Some(Number(2)), "taking alone leaves the row");
    vault
        .update(&key("a"), |slot| {
            slot.put(Number(3), MINUTE);
            slot.take();
        })
        .unwrap();
    assert_eq!(get(), Some(Number(2)), "what was put was taken back");
    let ends = vault.update(&key("a"), |slot| {
        let ends = slot.expires_at().unwrap().saturating_since(slot.now());
        slot.remove();
        ends
    });
    assert!(ends.unwrap() <= MINUTE);
    assert_eq!(get(), None);
}

#[test]
fn a_scan_sees_every_live_row_once_across_pages() {
    let vault: Vault<Number> = Vault::builder("numbers").in_memory().open().unwrap();
    for number in 0..2_500_u64 {
        let key = Key::new("test", &number.to_string()).unwrap();
        drop(vault.update_async(&key, move |slot| slot.put(Number(number), DAY)));
    }
    vault.flush().unwrap();
    let mut found: Vec<u64> = vault.scan().map(|row| row.unwrap().value.0).collect();
    found.sort_unstable();
    assert_eq!(found, (0..2_500).collect::<Vec<_>>());
    let first = vault.scan().next().unwrap().unwrap();
    assert_eq!(first.key.client(), Client::from("0"));
    assert!(first.expires_at > ratevault::Timestamp::from_millis(0));
}

#[test]
fn tables_of_one_file_are_apart() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vault.redb");
    let open = |table| Vault::<Number>::builder(table).path(&path).open().unwrap();
    let (one, two) = (open("one"), open("two"));
    one.put(&key("a"), Number(1), MINUTE).unwrap();
    two.put(&key("a"), Number(2), MINUTE).unwrap();
    assert_eq!(one.get(&key("a")).unwrap(), Some(Number(1)));
    assert_eq!(two.get(&key("a")).unwrap(), Some(Number(2)));
    assert_eq!(two.remove_endpoint("test").unwrap(), 1);
    assert_eq!((one.len().unwrap(), two.len().unwrap()), (1, 0));
}

#[test]
fn reset_forgets_one_pair_and_reset_endpoint_all_of_one_endpoint() {
    let vault = Vault::builder("rate_limits").in_memory().open().unwrap();
    let limiter = Limiter::new(
        vault,
        SlidingWindow::new(Quota::per_day(2).unwrap()).unwrap(),
    );
    for client in 0..1_500 {
        drop(limiter.check_async("login", &client.to_string()));
        drop(limiter.check_async("login2", &client.to_string()));
    }
    limiter.vault().flush().unwrap();
    limiter.reset("login", "7").unwrap();
    assert_eq!(limiter.peek("login", "7").unwrap().remaining(), 2);
    assert_eq!(limiter.peek("login", "8").unwrap().remaining(), 1);
    assert_eq!(limiter.reset_endpoint("login").unwrap(), 1_499);
    assert_eq!(limiter.vault().len().unwrap(), 1_500);
    assert_eq!(limiter.peek("login2", "8").unwrap().remaining(), 1);
}

#[test]
fn a_changed_quota_applies_to_the_stored_list_at_once() {
    let clock = manual_clock();
    let vault = Vault::builder("rate_limits")
        .in_memory()
        .clock(clock.clone())
        .open()
        .unwrap();
    let limiter = |limit| {
        let window = SlidingWindow::new(Quota::per_minute(limit).unwrap()).unwrap();
        Limiter::new(vault.clone(), window)
    };
    for _ in 0..4 {
        assert!(limiter(5).check("login", "ada").unwrap().is_allowed());
        clock.advance(SECOND);
    }
    assert!(!limiter(3).check("login", "ada").unwrap().is_allowed());
    // Under the smaller limit only the newest three were kept.
    let raised = limiter(10).check("login", "ada").unwrap();
    assert!(raised.is_allowed());
    assert_eq!(raised.remaining(), 6);
}

#[test]
fn the_longest_ttl_does_not_overflow() {
    let vault: Vault<Number> = Vault::builder("numbers").in_memory().open().unwrap();
    vault.put(&key("a"), Number(1), Duration::MAX).unwrap();
    assert_eq!(vault.get(&key("a")).unwrap(), Some(Number(1)));
    vault.put(&key("a"), Number(2), SECOND).unwrap();
    assert_eq!(vault.scan().count(), 1);
    assert!(vault.remove(&key("a")).unwrap());
    assert!(vault.is_empty().unwrap());
}

#[test]
fn a_busy_endpoint_can_be_reset() {
    let vault = Vault::builder("rate_limits").in_memory().open().unwrap();
    let window = SlidingWindow::new(Quota::per_hour(5).unwrap()).unwrap();
    let limiter = Limiter::new(vault, window);
    let done = AtomicBool::new(false);
    let allowed = AtomicU64::new(0);
    thread::scope(|scope| {
        for client in 0..8 {
            let (limiter, done, allowed) = (&limiter, &done, &allowed);
            scope.spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    let decision = limiter.check("login", &client.to_string()).unwrap();
                    allowed.fetch_add(u64::from(decision.is_allowed()), Ordering::Relaxed);
                }
            });
        }
        eventually("all have used up theirs", || {
            allowed.load(Ordering::Relaxed) == 40
        });
        assert_eq!(limiter.reset_endpoint("login").unwrap(), 8);
        eventually("once more", || allowed.load(Ordering::Relaxed) == 80);
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!(allowed.into_inner(), 80);
}

#[test]
fn what_is_answered_as_stored_can_be_read_back() {
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Numbers(Vec<u64>);

    impl Row for Numbers {
        const KIND: &'static str = "numbers/1";
    }

    let vault: Vault<Numbers> = Vault::builder("numbers").in_memory().open().unwrap();
    // Short when encoded, long when decoded.
    for count in [1_000, 100_000, 131_000, 132_000, 200_000] {
        let numbers = || Numbers(vec![1; count]);
        match vault.put(&key("a"), numbers(), MINUTE) {
            Ok(()) => assert_eq!(vault.get(&key("a")).unwrap(), Some(numbers())),
            Err(Error::Encode { .. }) => assert!(count > 131_000, "{count}"),
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(
        vault.get(&key("a")).unwrap(),
        Some(Numbers(vec![1; 131_000]))
    );
}

#[test]
fn many_damaged_rows_do_not_keep_the_sweep_from_its_end() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vault.redb");
    let clock = manual_clock();
    let open = || {
        let builder = Vault::<Number>::builder("numbers")
            .path(&path)
            .clock(clock.clone());
        builder.background_sweep(false).open().unwrap()
    };
    let vault = open();
    for client in 0..1_200 {
        drop(vault.update_async(&key(&client.to_string()), |slot| {
            slot.put(Number(1), MINUTE)
        }));
    }
    vault.close().unwrap();
    let rows = Contents::read(&path, "numbers").rows;
    let keys: Vec<&[u8]> = rows.keys().map(Vec::as_slice).collect();
    damage_rows(&path, "numbers", &keys);

    let vault = open();
    vault.put(&key("whole"), Number(1), DAY).unwrap();
    for _ in 0..3 {
        clock.advance(DAY);
        vault.sweep().unwrap();
        assert_eq!(
            vault.len().unwrap(),
            1_200,
            "the whole row went, the damaged ones stay"
        );
    }
    // Nor does the background sweep find work in them without end.
    drop(vault);
    let vault = Vault::<Number>::builder("numbers")
        .path(&path)
        .clock(clock.clone());
    let vault = vault.open().unwrap();
    vault.put(&key("whole"), Number(1), SECOND).unwrap();
    clock.advance(DAY);
    eventually("the whole row goes", || vault.len().unwrap() == 1_200);
}

#[test]
fn the_settings_of_a_table_go_with_its_last_handle_also_while_the_file_is_busy() {
    let storage = Arc::new(MemoryStorage::default());
    let builder = |table| Vault::<Number>::builder(table).storage(Arc::clone(&storage));
    let busy = builder("busy").open().unwrap();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                busy.put(&key("a"), Number(1), MINUTE).unwrap();
            }
        });
        for max_keys in 1..500 {
            let vault = builder("numbers").max_keys(max_keys).open();
            // Rows that are due, so that the writer has the table in its hands.
            let put = vault.and_then(|vault| vault.put(&key("a"), Number(1), Duration::ZERO));
            if let Err(error) = put {
                done.store(true, Ordering::Relaxed);
                panic!("{error}");
            }
        }
        done.store(true, Ordering::Relaxed);
    });
}
