//! A table never holds more than its bound, and the row that goes is the right one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use ratevault::{
    Clock, HitLog, Limiter, ManualClock, Quota, Refusals, SlidingWindow, Timestamp, Vault,
    VaultBuilder,
};

use crate::support::file::{Contents, damage_row};
use crate::support::{
    DAY, MINUTE, Number, SECOND, START, eventually, key, manual_clock, single_threaded,
};

fn builder<V: ratevault::Row>(clock: &Arc<ManualClock>, max_keys: u64) -> VaultBuilder<V> {
    let builder = Vault::builder("bound").clock(clock.clone());
    builder.background_sweep(false).max_keys(max_keys)
}

#[test]
fn a_flood_of_clients_stays_within_the_bound() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vault.redb");
    let vault: Vault<HitLog> = Vault::builder("bound")
        .path(&path)
        .max_keys(10_000)
        .open()
        .unwrap();
    let limiter = Limiter::new(
        vault,
        SlidingWindow::new(Quota::per_day(5).unwrap()).unwrap(),
    );
    let mut size_when_full = 0;
    for wave in 0..100_u32 {
        let checks = (0..1_000).map(|n| {
            let client = std::net::Ipv4Addr::from(wave * 1_000 + n);
            limiter.check_async("login", client)
        });
        let checks: Vec<_> = checks.collect();
        let runtime = single_threaded();
        for check in checks {
            assert!(runtime.block_on(check).unwrap().is_allowed());
        }
        let rows = limiter.vault().len().unwrap();
        assert_eq!(rows, 10_000.min(u64::from(wave + 1) * 1_000));
        if wave == 19 {
            size_when_full = path.metadata().unwrap().len();
        }
    }
    let size = path.metadata().unwrap().len();
    assert!(
        size <= 2 * size_when_full,
        "{size_when_full} grew to {size} bytes"
    );
    assert_eq!(limiter.vault().stats().unwrap().evicted, 90_000);
}

/// Two clients alternate on one limit, a second apart. Says how many of their checks are allowed.
fn allowed_of(limiter: &Limiter<SlidingWindow>, clock: &ManualClock, checks: u32) -> u32 {
    let mut allowed = 0;
    for check in 0..checks {
        clock.advance(SECOND);
        let client = if check % 2 == 0 { "ada" } else { "bob" };
        allowed += u32::from(limiter.check("login", client).unwrap().is_allowed());
    }
    allowed
}

fn limiter(vault: &Vault<HitLog>, quota: &str) -> Limiter<SlidingWindow> {
    let window = SlidingWindow::new(quota.parse().unwrap()).unwrap();
    Limiter::new(vault.clone(), window)
}

/// A table that rows of `filler`'s window fill to its bound.
fn full_table(clock: &Arc<ManualClock>, filler: &str) -> Vault<HitLog> {
    let vault = builder(clock, 100).in_memory().open().unwrap();
    let filler = limiter(&vault, filler);
    for client in 0..100 {
        clock.advance(Duration::from_millis(1));
        filler.check("filler", &client.to_string()).unwrap();
    }
    assert_eq!(vault.len().unwrap(), 100);
    vault
}

#[test]
fn a_full_table_of_longer_windows_does_not_turn_a_limit_off() {
    for (filler, quota) in [("5/day", "5/minute"), ("5/15 minutes", "5/10 minutes")] {
        let clock = manual_clock();
        let empty = builder(&clock, 100).in_memory().open().unwrap();
        let expected = allowed_of(&limiter(&empty, quota), &clock, 600);
        let full = full_table(&manual_clock(), filler);
        let clock = manual_clock();
        drop(full);
        let full = full_table(&clock, filler);
        assert_eq!(allowed_of(&limiter(&full, quota), &clock, 600), expected);
        // Counted refusals keep a client out that does not pause.
        assert_eq!(expected, 10);
    }
}

#[test]
fn nor_does_a_clock_that_was_a_year_ahead() {
    let clock = manual_clock();
    let ahead = Timestamp::from_millis(START).saturating_add(365 * DAY);
    clock.set(ahead);
    let full = full_table(&clock, "5/day");
    clock.set(Timestamp::from_millis(START));
    assert_eq!(allowed_of(&limiter(&full, "5/minute"), &clock, 600), 10);
    // The rows from the future made room, although they end last.
    assert!(full.stats().unwrap().evicted >= 2);
}

#[test]
fn a_damaged_row_does_not_shield_rows_from_a_clock_that_ran_ahead() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vault.redb");
    let clock = manual_clock();
    let open = || {
        let builder = builder::<Number>(&clock, 3).path(&path);
        builder.open().unwrap()
    };
    clock.advance(365 * DAY);
    let vault = open();
    for client in ["a", "b", "z"] {
        clock.advance(SECOND);
        vault.put(&key(client), Number(1), MINUTE).unwrap();
    }
    vault.close().unwrap();
    // The last one filed.
    let contents = Contents::read(&path, "bound");
    damage_row(&path, "bound", &contents.deadlines.last().unwrap().2);
    clock.set(Timestamp::from_millis(START));

    let vault = open();
    for client in ["x", "y"] {
        clock.advance(SECOND);
        vault.put(&key(client), Number(1), MINUTE).unwrap();
    }
    // They took the places of the two whole rows from the future, not each other's.
    for client in ["x", "y"] {
        assert!(vault.get(&key(client)).unwrap().is_some(), "{client}");
    }
    vault.close().unwrap();

    // The sweep, too, looks behind it.
    let vault = Vault::<Number>::builder("bound")
        .clock(clock.clone())
        .path(&path);
    let vault = vault.background_sweep(false).open().unwrap();
    let ahead = clock.now().saturating_add(365 * DAY);
    clock.set(ahead);
    vault.put(&key("c"), Number(1), MINUTE).unwrap();
    clock.set(Timestamp::from_millis(START));
    vault.sweep().unwrap();
    vault.close().unwrap();
    let latest = START + 2 * 60_000;
    let contents = Contents::read(&path, "bound");
    assert!(contents.deadlines.iter().all(|entry| entry.1 <= latest));
}

#[test]
fn a_turned_over_table_forgets_at_a_price_and_no_more() {
    let clock = manual_clock();
    let vault = builder(&clock, 100).in_memory().open().unwrap();
    let window = SlidingWindow::new(Quota::per_hour(5).unwrap()).unwrap();
    let limiter = Limiter::new(vault, window.refusals(Refusals::Ignore));
    let mut allowed = 0;
    for check in 0..1_000 {
        clock.advance(Duration::from_millis(1));
        limiter.check("flood", &check.to_string()).unwrap();
        allowed += u32::from(limiter.check("login", "ada").unwrap().is_allowed());
    }
    // Ignored refusals are no writes, so each hundred newcomers forget the client once.
    assert!((10..=60).contains(&allowed), "{allowed}");
}

#[test]
fn with_expired_rows_in_a_full_table_no_live_one_goes() {
    let clock = manual_clock();
    let vault: Vault<Number> = builder(&clock, 20).in_memory().open().unwrap();
    // The live ones were written first, so that they would be the oldest.
    for client in 0..10 {
        vault
            .put(&key(&format!("live {client}")), Number(client), DAY)
            .unwrap();
    }
    clock.advance(SECOND);
    for client in 0..10 {
        vault
            .put(&key(&format!("short {client}")), Number(client), SECOND)
            .unwrap();
    }
    clock.advance(MINUTE);
    for client in 0..10 {
        vault
            .put(&key(&format!("new {client}")), Number(client), 2 * MINUTE)
            .unwrap();
        assert_eq!(vault.len().unwrap(), 20);
    }
    for client in 0..10 {
        assert!(
            vault
                .get(&key(&format!("live {client}")))
                .unwrap()
                .is_some()
        );
        assert!(vault.get(&key(&format!("new {client}"))).unwrap().is_some());
    }
    let stats = vault.stats().unwrap();
    assert_eq!((stats.evicted, stats.swept), (0, 10));
}

#[test]
fn a_lowered_bound_is_reached_in_bounded_steps() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vault.redb");
    let clock = manual_clock();
    let open = |max_keys| {
        builder::<Number>(&clock, max_keys)
            .path(&path)
            .open()
            .unwrap()
    };
    let vault = open(5_000);
    let runtime = single_threaded();
    let puts = (0..5_000).map(|n: u64| {
        vault.update_async(&key(&n.to_string()), move |slot| slot.put(Number(n), DAY))
    });
    for put in puts.collect::<Vec<_>>() {
        runtime.block_on(put).unwrap();
    }
    vault.close().unwrap();

    // Each newcomer evicts two until the bound is reached.
    let vault = open(4_990);
    for newcomer in 0..20_u64 {
        vault
            .put(&key(&format!("new {newcomer}")), Number(0), DAY)
            .unwrap();
        assert_eq!(vault.len().unwrap(), 4_990.max(5_000 - newcomer - 1));
    }
    vault.close().unwrap();

    // A sweep brings it there, a thousand rows a transaction.
    let vault = open(1_500);
    assert_eq!(vault.len().unwrap(), 4_990);
    assert_eq!(vault.sweep().unwrap(), 0, "none has expired");
    assert_eq!(vault.len().unwrap(), 1_500);
    assert_eq!(vault.stats().unwrap().evicted, 3_490);
    vault.close().unwrap();

    // So does the background sweep.
    let lowered = Vault::<Number>::builder("bound")
        .clock(clock.clone())
        .path(&path);
    let vault = lowered.max_keys(10).open().unwrap();
    eventually("it shrinks on its own", || vault.len().unwrap() == 10);
    eventually("it is counted", || vault.stats().unwrap().evicted == 1_490);
}

/// The rule of the bound, as plainly as it can be said.
#[derive(Default)]
struct Model {
    max_keys: usize,
    rows: BTreeMap<u8, Deadline>,
}

#[derive(Clone, Copy, Debug)]
struct Deadline {
    expires_at: u64,
    ttl: u64,
}

impl Model {
    fn put(&mut self, client: u8, ttl: u64, now: u64) -> Option<u8> {
        let newcomer = !self.rows.contains_key(&client);
        let victim = (newcomer && self.rows.len() >= self.max_keys).then(|| self.victim(now));
        if let Some(victim) = victim {
            self.rows.remove(&victim);
        }
        let expires_at = now + ttl;
        self.rows.insert(client, Deadline { expires_at, ttl });
        victim
    }

    /// One that has expired, else the one whose last write is oldest. Times differ, so that there
    /// is one.
    fn victim(&self, now: u64) -> u8 {
        let rank = |(client, row): (&u8, &Deadline)| {
            let live = row.expires_at > now;
            let order = if live { row.expires_at - row.ttl } else { 0 };
            ((live, order), *client)
        };
        self.rows.iter().map(rank).min().unwrap().1
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn the_victim_is_the_one_the_rule_names(
        max_keys in 1_u64..8,
        steps in prop::collection::vec((0_u8..16, 0_usize..4, 1_u64..3_000), 1..120),
    ) {
        let clock = manual_clock();
        let vault: Vault<Number> = builder(&clock, max_keys).in_memory().open().unwrap();
        let mut model = Model { max_keys: max_keys as usize, ..Model::default() };
        for (client, class, pause) in steps {
            clock.advance(Duration::from_millis(pause));
            let now = clock.now().as_millis();
            let ttl = [2_000, 5_000, 30_000, 3_600_000][class];
            let before = model.rows.clone();
            let victim = model.put(client, ttl, now);
            vault.put(&key(&client.to_string()), Number(1), Duration::from_millis(ttl)).unwrap();
            let stored = |client: &u8| vault.get(&key(&client.to_string())).unwrap().is_some();
            prop_assert!(vault.len().unwrap() <= max_keys);
            // Which of several expired rows goes is not promised, and not to be seen.
            for (client, row) in &model.rows {
                prop_assert_eq!(stored(client), row.expires_at > now, "{}", client);
            }
            if let Some(victim) = victim {
                prop_assert!(!stored(&victim), "{} of {:?}", victim, before);
            }
        }
    }
}
