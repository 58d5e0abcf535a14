//! Many callers, one truth.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::thread;
use std::time::Duration;

use ratevault::{Decision, Error, HitLog, Limiter, Quota, Refusals, SlidingWindow, Vault};

use crate::support::faulty::Faulty;
use crate::support::single_threaded;

const THREADS: u32 = 64;
const CHECKS: u32 = 1_000;
const LIMIT: u32 = 50;

pub fn window() -> SlidingWindow {
    let quota = Quota::per_hour(LIMIT).unwrap();
    let window = SlidingWindow::new(quota).unwrap();
    window.refusals(Refusals::Ignore)
}

/// The places that admitted checks were told are left: each of `LIMIT - 1` to 0 exactly once.
#[derive(Default)]
struct Admitted(Mutex<Vec<u32>>);

impl Admitted {
    fn note(&self, decision: &Decision) {
        if decision.is_allowed() {
            self.0.lock().unwrap().push(decision.remaining());
        }
    }

    fn check(self) {
        let admitted = self.0.into_inner().unwrap();
        assert_eq!(admitted.len(), LIMIT as usize);
        let distinct: BTreeSet<u32> = admitted.into_iter().collect();
        assert_eq!(distinct, (0..LIMIT).collect());
    }
}

/// 64 threads, one key, 64,000 checks.
pub fn hammer(limiter: &Limiter<SlidingWindow>) {
    let admitted = Admitted::default();
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                for _ in 0..CHECKS {
                    admitted.note(&limiter.check("login", "ada").unwrap());
                }
            });
        }
    });
    admitted.check();
}

#[test]
fn n_threads_on_one_key_never_admit_more_than_the_limit() {
    let directory = tempfile::tempdir().unwrap();
    let vault = Vault::builder("rate_limits").path(directory.path().join("vault.redb"));
    let limiter = Limiter::new(vault.open().unwrap(), window());
    hammer(&limiter);
}

#[test]
fn counted_refusals_admit_no_more_either() {
    let vault = Vault::builder("rate_limits").in_memory().open().unwrap();
    let limiter = Limiter::new(vault, window().refusals(Refusals::Count));
    hammer(&limiter);
}

#[test]
fn n_threads_admit_no_more_across_close_and_reopen() {
    let directory = tempfile::tempdir().unwrap();
    hammer_across_reopens(|| {
        let vault = Vault::builder("rate_limits").path(directory.path().join("vault.redb"));
        Limiter::new(vault.open().unwrap(), window())
    });
}

/// 64 threads, one key, while the file is closed and opened again five times.
pub fn hammer_across_reopens(open: impl Fn() -> Limiter<SlidingWindow> + Sync) {
    let limiter = RwLock::new(open());
    let admitted = Admitted::default();
    let checks = AtomicU64::new(0);
    let reopened = AtomicU64::new(0);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                for _ in 0..CHECKS {
                    let current = limiter.read().unwrap().clone();
                    match current.check("login", "ada") {
                        Ok(decision) => admitted.note(&decision),
                        // Turned away before it was queued: it does not count.
                        Err(Error::Closed { .. }) => {}
                        Err(error) => panic!("{error}"),
                    }
                    checks.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        scope.spawn(|| {
            for round in 1..=5 {
                while checks.load(Ordering::Relaxed) < round * 10 {
                    thread::yield_now();
                }
                limiter.read().unwrap().vault().close().unwrap();
                *limiter.write().unwrap() = open();
                reopened.fetch_add(1, Ordering::Relaxed);
            }
        });
    });
    assert_eq!(reopened.into_inner(), 5);
    // Some may have been turned away: what is left is admitted now.
    let limiter = limiter.into_inner().unwrap();
    while admitted.0.lock().unwrap().len() < LIMIT as usize {
        admitted.note(&limiter.check("login", "ada").unwrap());
    }
    assert!(!limiter.check("login", "ada").unwrap().is_allowed());
    admitted.check();
}

#[test]
fn n_threads_on_many_keys_never_admit_more_than_the_limit() {
    let directory = tempfile::tempdir().unwrap();
    let vault = Vault::builder("rate_limits").path(directory.path().join("vault.redb"));
    hammer_many_keys(&Limiter::new(vault.open().unwrap(), window()));
}

/// 64 threads, twenty keys, 64,000 checks.
pub fn hammer_many_keys(limiter: &Limiter<SlidingWindow>) {
    let clients: Vec<_> = (0..20).map(|client| client.to_string()).collect();
    let admitted: Vec<_> = clients.iter().map(|_| Admitted::default()).collect();
    thread::scope(|scope| {
        for number in 0..THREADS {
            let (clients, admitted) = (&clients, &admitted);
            scope.spawn(move || {
                for check in 0..CHECKS {
                    let client = (number + check) as usize % clients.len();
                    let decision = limiter.check("login", &clients[client]).unwrap();
                    admitted[client].note(&decision);
                }
            });
        }
    });
    admitted.into_iter().for_each(Admitted::check);
}

const SLOW_SYNC: Duration = Duration::from_millis(200);

fn slow_vault() -> Vault<HitLog> {
    let storage = Arc::new(Faulty::slow(SLOW_SYNC));
    Vault::builder("rate_limits")
        .storage(storage)
        .open()
        .unwrap()
}

#[test]
fn check_async_admits_no_more_on_a_slow_disk() {
    hammer_in_tasks(&Limiter::new(slow_vault(), window()));
}

/// 64 tasks of one thread, one key, 64,000 checks.
pub fn hammer_in_tasks(limiter: &Limiter<SlidingWindow>) {
    let admitted = Arc::new(Admitted::default());
    let tasks = tokio::task::LocalSet::new();
    for _ in 0..THREADS {
        let (limiter, admitted) = (limiter.clone(), Arc::clone(&admitted));
        tasks.spawn_local(async move {
            for _ in 0..CHECKS {
                admitted.note(&limiter.check_async("login", "ada").await.unwrap());
            }
        });
    }
    single_threaded().block_on(tasks);
    Arc::into_inner(admitted).unwrap().check();
}

#[test]
fn a_runtime_is_never_blocked() {
    let limiter = Limiter::new(slow_vault(), window());
    let tasks = tokio::task::LocalSet::new();
    let progress = single_threaded().block_on(tasks.run_until(async {
        let check = tokio::task::spawn_local(limiter.check_async("login", "ada"));
        let mut progress = 0_u64;
        while !check.is_finished() {
            progress += 1;
            tokio::task::yield_now().await;
        }
        assert!(check.await.unwrap().unwrap().is_allowed());
        progress
    }));
    // A commit takes two syncs of 200 ms: a blocked runtime would have counted once or twice.
    assert!(progress > 100, "{progress}");
}
