//! A limit is a limit, wherever its counts are at the moment.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use ratevault::{
    Durability, HitLog, Key, Limiter, Quota, Refusals, SlidingWindow, Timestamp, Vault,
    VaultBuilder,
};

use super::RARELY;
use crate::concurrency::{
    hammer, hammer_across_reopens, hammer_in_tasks, hammer_many_keys, window,
};
use crate::support::faulty::Faulty;
use crate::support::{DAY, START, manual_clock};

/// A flush is always under way.
const OFTEN: Durability = Durability::Buffered {
    flush_every: Duration::from_millis(1),
};

fn limits(durability: Durability) -> VaultBuilder<HitLog> {
    Vault::builder("rate_limits").durability(durability)
}

fn limiter(vault: VaultBuilder<HitLog>) -> Limiter<SlidingWindow> {
    Limiter::new(vault.open().unwrap(), window())
}

#[test]
fn n_threads_on_one_key_admit_exactly_the_limit() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vault.redb");
    hammer(&limiter(limits(OFTEN).path(path)));
    hammer(&limiter(limits(RARELY).in_memory()));
}

#[test]
fn counted_refusals_admit_no_more_in_memory_either() {
    let vault = limits(OFTEN).in_memory().open().unwrap();
    hammer(&Limiter::new(vault, window().refusals(Refusals::Count)));
}

#[test]
fn nothing_is_forgotten_across_close_and_reopen() {
    for durability in [OFTEN, RARELY] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vault.redb");
        hammer_across_reopens(|| limiter(limits(durability).path(&path)));
    }
}

#[test]
fn tasks_of_one_thread_admit_exactly_the_limit() {
    let storage = Arc::new(Faulty::slow(Duration::from_millis(20)));
    hammer_in_tasks(&limiter(limits(OFTEN).storage(storage)));
}

#[test]
fn n_threads_on_many_keys_admit_exactly_the_limit_of_each() {
    hammer_many_keys(&limiter(limits(OFTEN).in_memory()));
    // No two keys of a shard fit into memory together.
    hammer_many_keys(&limiter(limits(RARELY).in_memory().buffer_bytes(1)));
}

/// Makes others lose their place in memory until `done`.
fn crowd(limiter: &Limiter<SlidingWindow>, done: &AtomicBool) {
    let mut client = 0_u64;
    while !done.load(Ordering::Relaxed) {
        client = (client + 1) % 500;
        limiter.check("crowd", &client.to_string()).unwrap();
    }
}

#[test]
fn rows_that_leave_memory_all_the_time_admit_no_more() {
    let limiter = limiter(limits(OFTEN).in_memory().buffer_bytes(1));
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| crowd(&limiter, &done));
        // The crowd ends also if this fails.
        let hammered = scope.spawn(|| hammer(&limiter)).join();
        done.store(true, Ordering::Relaxed);
        hammered.unwrap();
    });
}

/// The hit times of a client that comes at each of `hits`, once they are on disk and read anew.
fn read_anew(hits: &[u64]) -> Vec<u64> {
    let (storage, clock) = (Arc::new(Faulty::default()), manual_clock());
    let open = || {
        let vault = limits(RARELY).storage(Arc::clone(&storage));
        vault.clock(clock.clone()).open().unwrap()
    };
    let quota = Quota::new(100_000, DAY).unwrap();
    let limiter = Limiter::new(open(), SlidingWindow::new(quota).unwrap());
    for hit in hits {
        clock.set(Timestamp::from_millis(*hit));
        limiter.check("login", "ada").unwrap();
    }
    limiter.vault().close().unwrap();
    let log = open().get(&Key::new("login", "ada").unwrap()).unwrap();
    log.unwrap().times().map(Timestamp::as_millis).collect()
}

#[test]
fn a_long_list_of_hits_comes_to_the_file_as_it_is() {
    let each_in_its_own_ms: Vec<_> = (START..START + 500).collect();
    assert_eq!(read_anew(&each_in_its_own_ms), each_in_its_own_ms);
    let many_in_each_ms: Vec<_> = (0..500).map(|hit| START + hit / 40).collect();
    assert_eq!(read_anew(&many_in_each_ms), many_in_each_ms);
}
