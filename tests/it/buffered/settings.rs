//! What a builder says about durability, and what others have said before.

use std::sync::Arc;
use std::time::Duration;

use ratevault::{Durability, Error, Row, Vault, VaultBuilder};
use serde::{Deserialize, Serialize};

use super::{HOUR, RARELY, add_one, buffered, on_disk};
use crate::support::faulty::Faulty;
use crate::support::{MINUTE, Number, key};

const OFTEN: Durability = Durability::Buffered {
    flush_every: Duration::from_millis(250),
};

/// The setting, what is in force and what was asked for.
#[track_caller]
fn conflict<V: Row + std::fmt::Debug>(builder: VaultBuilder<V>) -> [String; 3] {
    let error = builder.open().unwrap_err();
    assert_eq!(error.to_string().lines().count(), 1);
    match error {
        Error::Conflict {
            setting,
            open,
            requested,
            ..
        } => [setting.into(), open, requested],
        other => panic!("{other:?}"),
    }
}

fn on(storage: &Arc<Faulty>) -> VaultBuilder<Number> {
    Vault::builder("numbers").storage(Arc::clone(storage))
}

#[test]
fn two_handles_that_disagree_on_the_durability_hear_of_both() {
    let storage = Arc::new(Faulty::default());
    let vault = on(&storage).durability(OFTEN).open().unwrap();
    let said = |durability| conflict(on(&storage).durability(durability));
    let (open, committed) = (format!("{OFTEN:?}"), "Committed".to_owned());
    assert_eq!(
        said(Durability::Committed),
        ["durability".into(), open.clone(), committed.clone()]
    );
    assert_eq!(
        said(RARELY),
        ["durability".into(), open.clone(), format!("{RARELY:?}")]
    );
    // Whoever says nothing takes what is there.
    add_one(&on(&storage).open().unwrap(), "ada");
    assert_eq!(on_disk(&storage, "ada"), None);
    drop(vault);

    let _committed = on(&storage).open().unwrap();
    let said = conflict(on(&storage).durability(OFTEN));
    assert_eq!(said, ["durability".into(), committed, open]);
}

#[test]
fn two_handles_that_disagree_on_the_buffer_hear_of_both() {
    let storage = Arc::new(Faulty::default());
    let _vault = buffered(&storage).buffer_bytes(1_000).open().unwrap();
    let said = conflict(on(&storage).buffer_bytes(2_000));
    assert_eq!(said, ["buffer_bytes", "1000", "2000"]);
    buffered(&storage).buffer_bytes(1_000).open().unwrap();
}

#[test]
fn a_flush_takes_a_millisecond_at_least() {
    let open = |flush_every| {
        let vault = Vault::<Number>::builder("numbers").in_memory();
        vault
            .durability(Durability::Buffered { flush_every })
            .open()
            .map(drop)
    };
    for too_short in [Duration::ZERO, Duration::from_micros(999)] {
        let error = open(too_short).unwrap_err();
        let Error::InvalidSetting { setting, value, .. } = error else {
            panic!("{error:?}");
        };
        assert_eq!((setting, value), ("flush_every", format!("{too_short:?}")));
    }
    open(Duration::from_millis(1)).unwrap();
    open(Duration::MAX).unwrap();
}

/// Another type that claims to be encoded like a number.
#[derive(Debug, Serialize, Deserialize)]
struct Namesake(u64);

impl Row for Namesake {
    const KIND: &'static str = Number::KIND;
}

#[test]
fn another_type_of_the_same_kind_is_a_conflict_while_the_file_is_open() {
    let storage = Arc::new(Faulty::default());
    let vault = buffered(&storage).open().unwrap();
    add_one(&vault, "ada");
    let namesake = || Vault::<Namesake>::builder("numbers").storage(Arc::clone(&storage));
    let [setting, open, requested] = conflict(namesake());
    assert!(setting.contains("type"), "{setting}");
    assert!(open.contains("number/1"), "{open}");
    assert!(requested.contains("Namesake"), "{requested}");
    // Nobody was harmed by it.
    assert_eq!(add_one(&vault, "ada"), 2);
    drop(vault);
    let vault = namesake().open().unwrap();
    assert_eq!(vault.get(&key("ada")).unwrap().unwrap().0, 2);
}

#[test]
fn rows_in_memory_outlive_the_handles_of_their_table() {
    let storage = Arc::new(Faulty::default());
    let other = Vault::<Number>::builder("others").storage(Arc::clone(&storage));
    let other = other.open().unwrap();
    let vault = buffered(&storage).open().unwrap();
    add_one(&vault, "ada");
    drop(vault);
    // The file is still open, so it has not been flushed, and nobody needs it to be.
    assert_eq!(on_disk(&storage, "ada"), None);
    let vault = on(&storage).open().unwrap();
    assert_eq!(add_one(&vault, "ada"), 2);
    drop(vault);
    other.close().unwrap();
    assert_eq!(on_disk(&storage, "ada"), Some(Number(2)));
}

#[test]
fn rows_without_a_handle_are_flushed_all_the_same() {
    let storage = Arc::new(Faulty::default());
    let other = Vault::<Number>::builder("others").storage(Arc::clone(&storage));
    let _other = other.open().unwrap();
    let flush_every = Duration::from_millis(5);
    let vault = on(&storage).durability(Durability::Buffered { flush_every });
    add_one(&vault.open().unwrap(), "ada");
    crate::support::eventually("the flush", || on_disk(&storage, "ada") == Some(Number(1)));
}

#[test]
fn the_durability_may_be_another_once_the_file_was_closed() {
    let storage = Arc::new(Faulty::default());
    add_one(&buffered(&storage).open().unwrap(), "ada");
    let vault = on(&storage)
        .durability(Durability::Committed)
        .open()
        .unwrap();
    assert_eq!(add_one(&vault, "ada"), 2);
    assert_eq!(on_disk(&storage, "ada"), Some(Number(2)));
    drop(vault);
    let vault = buffered(&storage).open().unwrap();
    assert_eq!(add_one(&vault, "ada"), 3);
    assert_eq!(on_disk(&storage, "ada"), Some(Number(2)));
}

#[test]
fn committed_and_buffered_tables_of_one_file_keep_their_own_promises() {
    let storage = Arc::new(Faulty::default());
    let vault = buffered(&storage).open().unwrap();
    let committed = Vault::<Number>::builder("committed").storage(Arc::clone(&storage));
    let committed = committed.open().unwrap();
    add_one(&vault, "ada");
    committed.put(&key("ada"), Number(7), MINUTE).unwrap();
    // The commit of the one says nothing of the other.
    assert_eq!(on_disk(&storage, "ada"), None);
    let image = Arc::new(Faulty::with_image(storage.durable_image()));
    let found = Vault::<Number>::builder("committed").storage(image);
    let found = found.open().unwrap().get(&key("ada")).unwrap();
    assert_eq!(found, Some(Number(7)));
    // Nor does its sync hold up a decision in memory.
    storage.hold(true);
    let held = committed.update_async(&key("ada"), |slot| slot.remove());
    storage.until_a_sync_waits();
    assert_eq!(add_one(&vault, "ada"), 2);
    storage.hold(false);
    crate::support::single_threaded().block_on(held).unwrap();
    vault.flush().unwrap();
    assert_eq!(on_disk(&storage, "ada"), Some(Number(2)));
    assert_eq!(committed.stats().unwrap().flushes, 0);
}

#[test]
fn an_open_that_failed_leaves_no_setting_behind() {
    let storage = Arc::new(Faulty::default());
    let _other = Vault::<Number>::builder("others")
        .storage(Arc::clone(&storage))
        .open();
    let hits = || Vault::<ratevault::HitLog>::builder("others").storage(Arc::clone(&storage));
    let flush_every = HOUR;
    for durability in [Durability::Buffered { flush_every }, Durability::Committed] {
        let error = hits().durability(durability).open().unwrap_err();
        assert!(matches!(error, Error::WrongKind { .. }), "{error:?}");
    }
}
