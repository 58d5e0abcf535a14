//! The clock is set back or jumps ahead: nobody is locked out, nobody is let in early.

use std::sync::Arc;
use std::time::Duration;

use ratevault::{
    Algorithm, Clock, FixedWindow, Limiter, ManualClock, Quota, Refusals, SlidingWindow,
    SystemClock, Timestamp, Vault,
};

use crate::support::{DAY, MINUTE, SECOND, START, manual_clock};

const HOUR: Duration = Duration::from_secs(3_600);

/// Uses up the limit, sets the clock back, and polls every second. The first check that is allowed
/// must come one window after the first poll, to the second.
fn set_back<A: Algorithm + Clone>(algorithm: &A, back: Duration, reopen: bool) {
    let directory = tempfile::tempdir().unwrap();
    let clock = manual_clock();
    let open = || {
        let path = directory.path().join("vault.redb");
        let vault = Vault::builder("rate_limits")
            .path(path)
            .clock(clock.clone());
        Limiter::new(vault.open().unwrap(), algorithm.clone())
    };
    let mut limiter = open();
    for _ in 0..3 {
        assert!(limiter.check("login", "ada").unwrap().is_allowed());
        clock.advance(SECOND);
    }
    if reopen {
        limiter.vault().close().unwrap();
    }
    let set = START - back.as_millis() as u64;
    clock.set(Timestamp::from_millis(set));
    if reopen {
        limiter = open();
    }
    let peeked = limiter.peek("login", "ada").unwrap();
    assert_eq!(peeked.remaining(), 0);
    assert_eq!(peeked.reset_after(), MINUTE);
    let waited = (0..=120).find(|_| {
        let allowed = limiter.check("login", "ada").unwrap().is_allowed();
        if !allowed {
            clock.advance(SECOND);
        }
        allowed
    });
    assert_eq!(waited, Some(60), "back {back:?}, reopened: {reopen}");
}

#[test]
fn a_clock_that_is_set_back_costs_one_window_and_admits_nobody_early() {
    let sliding = SlidingWindow::new(Quota::per_minute(3).unwrap()).unwrap();
    for back in [HOUR, 365 * DAY] {
        for reopen in [false, true] {
            set_back(&sliding.clone().refusals(Refusals::Ignore), back, reopen);
            set_back(
                &FixedWindow::new(Quota::per_minute(3).unwrap()),
                back,
                reopen,
            );
        }
    }
}

#[test]
fn with_counted_refusals_a_client_that_waits_is_admitted_after_one_window() {
    for (back, reopen) in [
        (HOUR, false),
        (HOUR, true),
        (365 * DAY, false),
        (365 * DAY, true),
    ] {
        let storage = Arc::new(ratevault::MemoryStorage::default());
        let clock = manual_clock();
        let open = || {
            let vault = Vault::builder("rate_limits").storage(Arc::clone(&storage));
            let window = SlidingWindow::new(Quota::per_minute(3).unwrap()).unwrap();
            Limiter::new(vault.clock(clock.clone()).open().unwrap(), window)
        };
        let mut limiter = open();
        limiter.check_n("login", "ada", 3).unwrap();
        clock.set(Timestamp::from_millis(START - back.as_millis() as u64));
        if reopen {
            limiter.vault().close().unwrap();
            limiter = open();
        }
        let refused = limiter.check("login", "ada").unwrap();
        assert_eq!(refused.retry_after(), Some(60));
        clock.advance(59 * SECOND);
        assert_eq!(limiter.peek("login", "ada").unwrap().remaining(), 0);
        clock.advance(SECOND);
        assert!(limiter.check("login", "ada").unwrap().is_allowed());
    }
}

#[test]
fn clients_are_told_one_window_at_most_also_by_rows_renewed_ahead() {
    let clock = manual_clock();
    let vault = Vault::builder("rate_limits")
        .in_memory()
        .clock(clock.clone());
    let window = SlidingWindow::new(Quota::per_minute(2).unwrap()).unwrap();
    let limiter = Limiter::new(vault.open().unwrap(), window);
    limiter.check("login", "ada").unwrap();
    // The row is filed now and renewed a year ahead.
    clock.advance(365 * DAY);
    limiter.check_n("login", "ada", 2).unwrap();
    clock.set(Timestamp::from_millis(START));
    assert_eq!(
        limiter.check("login", "ada").unwrap().retry_after(),
        Some(60)
    );
}

#[test]
fn the_system_clock_is_close_to_the_wall_and_never_goes_back() {
    let (first, wall) = (SystemClock.now(), SystemClock.wall());
    let apart = wall
        .saturating_since(first)
        .max(first.saturating_since(wall));
    assert!(apart < DAY, "{apart:?}");
    let mut last = first;
    for _ in 0..10_000 {
        let now = SystemClock.now();
        assert!(now >= last);
        last = now;
    }
}

#[test]
fn a_manual_clock_saturates() {
    let clock = ManualClock::new(Timestamp::from_millis(u64::MAX - 5));
    clock.advance(DAY);
    assert_eq!(clock.now().as_millis(), u64::MAX);
    let vault = Vault::builder("rate_limits")
        .in_memory()
        .clock(Arc::new(clock));
    let window = SlidingWindow::new(Quota::per_minute(1).unwrap()).unwrap();
    let limiter = Limiter::new(vault.open().unwrap(), window);
    limiter.check("login", "ada").unwrap();
    limiter.check("login", "ada").unwrap();
}
