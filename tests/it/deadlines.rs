//! The deadline index: every row is filed once, and nothing is filed without its row.

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;
use ratevault::{Clock, Timestamp, Vault};

use crate::support::file::Contents;
use crate::support::{MINUTE, Number, SECOND, START, key, manual_clock};

#[derive(Clone, Debug)]
enum Step {
    Put { client: u8, ttl: u64 },
    Renew { client: u8 },
    Remove { client: u8 },
    RemoveAll,
    Sweep,
    Reopen { max_keys: u64 },
    Advance { ms: u64 },
    SetBack { ms: u64 },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let client = 0_u8..12;
    let ttl = prop_oneof![
        Just(0_u64),
        Just(1_000),
        Just(5_000),
        Just(60_000),
        // Enough different ones that some share the last class.
        100_000_u64..100_200,
    ];
    let step = prop_oneof![
        8 => (client.clone(), ttl).prop_map(|(client, ttl)| Step::Put { client, ttl }),
        4 => client.clone().prop_map(|client| Step::Renew { client }),
        2 => client.prop_map(|client| Step::Remove { client }),
        1 => Just(Step::RemoveAll),
        2 => Just(Step::Sweep),
        1 => (3_u64..12).prop_map(|max_keys| Step::Reopen { max_keys }),
        4 => (1_u64..20_000).prop_map(|ms| Step::Advance { ms }),
        1 => (1_u64..400_000).prop_map(|ms| Step::SetBack { ms }),
    ];
    prop::collection::vec(step, 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn the_invariant_holds_after_any_steps(steps in steps()) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vault.redb");
        let clock = manual_clock();
        let open = |max_keys| {
            let builder = Vault::<Number>::builder("numbers").path(&path).clock(clock.clone());
            builder.background_sweep(false).max_keys(max_keys).open().unwrap()
        };
        let mut vault = open(6);
        for step in steps {
            match step {
                Step::Put { client, ttl } => {
                    let ttl = Duration::from_millis(ttl);
                    vault.put(&key(&client.to_string()), Number(1), ttl).unwrap();
                }
                // Only the deadline of a live or a revived row moves.
                Step::Renew { client } => {
                    vault.update(&key(&client.to_string()), |slot| {
                        let Number(number) = slot.take().unwrap_or_default();
                        slot.put(Number(number + 1), 5 * SECOND);
                    }).unwrap();
                }
                Step::Remove { client } => drop(vault.remove(&key(&client.to_string())).unwrap()),
                Step::RemoveAll => drop(vault.remove_endpoint("test").unwrap()),
                Step::Sweep => {
                    vault.sweep().unwrap();
                    prop_assert_eq!(vault.len().unwrap(), vault.scan().count() as u64);
                }
                Step::Reopen { max_keys } => {
                    vault.close().unwrap();
                    Contents::read(&path, "numbers").check_invariant();
                    vault = open(max_keys);
                }
                Step::Advance { ms } => clock.advance(Duration::from_millis(ms)),
                Step::SetBack { ms } => {
                    let back = clock.now().as_millis().saturating_sub(ms);
                    clock.set(Timestamp::from_millis(back));
                }
            }
        }
        vault.close().unwrap();
        let contents = Contents::read(&path, "numbers");
        contents.check_invariant();

        // Far in the future nothing is left, so nothing was orphaned.
        clock.advance(Duration::from_secs(1_000_000));
        let vault = open(6);
        vault.sweep().unwrap();
        prop_assert!(vault.is_empty().unwrap());
        vault.close().unwrap();
        prop_assert!(Contents::read(&path, "numbers").deadlines.is_empty());
    }
}

#[test]
fn a_renewal_leaves_the_entry_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vault.redb");
    let clock = manual_clock();
    let vault = Vault::<Number>::builder("numbers")
        .path(&path)
        .clock(clock.clone());
    let vault = vault.background_sweep(false).open().unwrap();
    vault.put(&key("a"), Number(1), MINUTE).unwrap();
    for _ in 0..30 {
        clock.advance(SECOND);
        vault.put(&key("a"), Number(1), MINUTE).unwrap();
    }
    vault.close().unwrap();
    let contents = Contents::read(&path, "numbers");
    let header = contents.rows.values().next().unwrap();
    assert_eq!(header.filed_at, START + 60_000);
    assert_eq!(header.expires_at, START + 90_000);
}

#[test]
fn from_the_64th_ttl_on_rows_share_a_class() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vault.redb");
    let vault = Vault::<Number>::builder("numbers")
        .path(&path)
        .clock(manual_clock());
    let vault = vault.background_sweep(false).open().unwrap();
    for ttl in 1..=70_u64 {
        let ttl_of_its_own = Duration::from_secs(1_000 - ttl);
        vault
            .put(&key(&ttl.to_string()), Number(ttl), ttl_of_its_own)
            .unwrap();
    }
    vault.close().unwrap();
    let contents = Contents::read(&path, "numbers");
    contents.check_invariant();
    let mut classes = BTreeMap::<u64, u64>::new();
    for (class, ..) in &contents.deadlines {
        *classes.entry(*class).or_default() += 1;
    }
    assert_eq!(classes.len(), 64);
    assert_eq!(classes.get(&u64::MAX), Some(&7));
}
