//! A vault, looked at from outside.

use std::path::Path;
use std::time::Duration;

use ratevault::{
    Client, Error, FixedWindow, Key, Limiter, Quota, SlidingWindow, Snapshot, State, Timestamp,
    Vault,
};

use crate::support::file::{Contents, damage_row};
use crate::support::{DAY, MINUTE, Number, START, key, manual_clock};

fn sliding(path: &Path) -> Limiter<SlidingWindow> {
    let vault = Vault::builder("rate_limits")
        .path(path)
        .clock(manual_clock());
    let window = SlidingWindow::new(Quota::per_minute(5).unwrap()).unwrap();
    Limiter::new(vault.background_sweep(false).open().unwrap(), window)
}

#[test]
fn every_kind_of_table_is_shown_while_its_owner_writes() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vault.redb");
    let limiter = sliding(&path);
    limiter.check_n("login", "ada", 2).unwrap();
    let fixed = Vault::builder("uploads").path(&path).open().unwrap();
    let fixed = Limiter::new(fixed, FixedWindow::new(Quota::per_day(9).unwrap()));
    fixed.check_n("upload", "bob", 3).unwrap();
    let other: Vault<Number> = Vault::builder("numbers").path(&path).open().unwrap();
    other.put(&key("a"), Number(7), MINUTE).unwrap();

    let snapshot = Snapshot::open(&path).unwrap();
    let tables = snapshot.tables().unwrap();
    let tables: Vec<_> = tables
        .iter()
        .map(|t| (&*t.name, &*t.kind, t.rows))
        .collect();
    assert_eq!(
        tables,
        [
            ("numbers", "number/1", 1),
            ("rate_limits", "sliding-log/1", 1),
            ("uploads", "fixed-window/1", 1),
        ]
    );
    let only = |table| {
        let mut rows = snapshot.rows(table).unwrap();
        let row = rows.next().unwrap().unwrap();
        assert!(rows.next().is_none());
        row
    };
    let row = only("rate_limits");
    assert_eq!(
        (&*row.key.endpoint(), row.key.client()),
        ("login", Client::from("ada"))
    );
    assert_eq!(row.expires_at, Timestamp::from_millis(START + 61_000));
    match row.value {
        State::SlidingLog(log) => {
            let times: Vec<_> = log.times().map(Timestamp::as_millis).collect();
            assert_eq!(times, [START, START]);
        }
        other => panic!("{other:?}"),
    }
    match only("uploads").value {
        State::FixedWindow(count) => assert_eq!(
            (count.used(), count.start()),
            (3, Timestamp::from_millis(START))
        ),
        other => panic!("{other:?}"),
    }
    assert_eq!(only("numbers").value, State::Other(vec![7]));

    // It follows the commits.
    limiter.check("login", "eve").unwrap();
    assert_eq!(snapshot.rows("rate_limits").unwrap().count(), 2);
    match snapshot.rows("none") {
        Err(Error::NoSuchTable { table, tables, .. }) => {
            assert_eq!((&*table, tables.len()), ("none", 3));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn rows_come_whole_across_pages_and_by_endpoint() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vault.redb");
    let vault: Vault<Number> = Vault::builder("numbers").path(&path).open().unwrap();
    for number in 0..25_000_u64 {
        let endpoint = if number % 5 == 0 { "five" } else { "other" };
        let key = Key::new(endpoint, &number.to_string()).unwrap();
        drop(vault.update_async(&key, move |slot| slot.put(Number(number), DAY)));
        if number % 10_000 == 0 {
            vault.flush().unwrap();
        }
    }
    vault.flush().unwrap();
    let snapshot = Snapshot::open(&path).unwrap();
    let mut rows = snapshot.rows("numbers").unwrap();
    let mut keys: Vec<_> = rows.by_ref().map(|row| row.unwrap().key).collect();
    assert_eq!((rows.met(), rows.stated()), (25_000, 25_000));
    assert!(keys.is_sorted());
    keys.dedup();
    assert_eq!(keys.len(), 25_000);
    let five = snapshot.rows("numbers").unwrap().endpoint("five").unwrap();
    assert_eq!(
        five.map(|row| row.unwrap())
            .filter(|row| row.key.endpoint() == "five")
            .count(),
        5_000
    );
    let none = snapshot.rows("numbers").unwrap().endpoint("fiv").unwrap();
    assert_eq!(none.count(), 0);
}

#[test]
fn a_snapshot_changes_nothing_and_shows_expired_rows() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vault.redb");
    let limiter = sliding(&path);
    limiter.check("login", "ada").unwrap();
    drop(limiter);
    let before = std::fs::read(&path).unwrap();
    let snapshot = Snapshot::open(&path).unwrap();
    // By the wall clock it expired long ago, or is far ahead.
    assert_eq!(snapshot.rows("rate_limits").unwrap().count(), 1);
    drop(snapshot);
    assert_eq!(std::fs::read(&path).unwrap(), before);
}

#[test]
fn a_damaged_row_is_an_error_and_the_others_follow() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vault.redb");
    let limiter = sliding(&path);
    for client in ["a", "b", "c"] {
        limiter.check("login", client).unwrap();
    }
    drop(limiter);
    let rows = Contents::read(&path, "rate_limits").rows;
    damage_row(&path, "rate_limits", rows.keys().nth(1).unwrap());
    let snapshot = Snapshot::open(&path).unwrap();
    let rows: Vec<_> = snapshot.rows("rate_limits").unwrap().collect();
    assert_eq!(rows.len(), 3);
    assert!(rows[0].is_ok() && rows[2].is_ok());
    match &rows[1] {
        Err(Error::CorruptRow { client, .. }) => assert_eq!(client, "b"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_cannot_be_looked_into_is_said() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vault.redb");
    let open = || Snapshot::builder(&path).lock_timeout(Duration::ZERO).open();
    assert!(matches!(open(), Err(Error::Open { .. })));
    assert!(!path.exists(), "it never creates");
    std::fs::write(&path, "").unwrap();
    assert!(matches!(open(), Err(Error::NotAVault { .. })));
    std::fs::write(&path, "some text, long enough to have a magic number").unwrap();
    assert!(matches!(open(), Err(Error::NotAVault { .. })));
    std::fs::remove_file(&path).unwrap();
    let vault: Vault<Number> = Vault::builder("numbers")
        .path(&path)
        .exclusive()
        .open()
        .unwrap();
    assert!(matches!(open(), Err(Error::ReadersKeptOut { .. })));
    drop(vault);
    open().unwrap();
}

#[test]
fn a_file_that_a_crash_left_is_shown_once_it_is_repaired() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vault.redb");
    let limiter = sliding(&path);
    limiter.check("login", "ada").unwrap();
    // As a crash would leave it: a copy of the file while nothing writes to it.
    let left = directory.path().join("left.redb");
    std::fs::copy(&path, &left).unwrap();
    let before = std::fs::read(&left).unwrap();
    let builder = || Snapshot::builder(&left).lock_timeout(Duration::ZERO);
    match builder().open() {
        Err(error @ Error::NotClosedCleanly { .. }) => {
            assert!(error.to_string().contains("--repair"), "{error}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(std::fs::read(&left).unwrap(), before);
    let snapshot = builder().repair(true).open().unwrap();
    assert_eq!(snapshot.rows("rate_limits").unwrap().count(), 1);
    drop(snapshot);
    // A file in use needs no repair, and gets none.
    Snapshot::builder(&path).repair(true).open().unwrap();
    limiter.check("login", "ada").unwrap();
}
