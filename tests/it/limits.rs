//! The laws of a limit, on the pure algorithms.

use std::time::Duration;

use proptest::prelude::*;
use ratevault::{
    Algorithm, Decision, Error, FixedWindow, Quota, Refusals, SlidingWindow, Timestamp,
};

fn at(ms: u64) -> Timestamp {
    Timestamp::from_millis(ms)
}

fn quota(limit: u32, window_ms: u64) -> Quota {
    Quota::new(limit, Duration::from_millis(window_ms)).unwrap()
}

/// A sliding window as plainly as it can be said: hits are kept while they count for any quota,
/// and counted one by one.
struct Plain {
    quotas: Vec<(u32, u64)>,
    counts_refusals: bool,
    hits: Vec<u64>,
}

impl Plain {
    fn counting(&self, (_, window): (u32, u64), now: u64) -> usize {
        self.hits
            .iter()
            .filter(|hit| now.saturating_sub(**hit) < window)
            .count()
    }

    fn fits(&self, now: u64, cost: u32) -> bool {
        let fits = |quota: &(u32, u64)| {
            let kept = self.counting(*quota, now).min(quota.0 as usize);
            kept + cost as usize <= quota.0 as usize
        };
        self.quotas.iter().all(fits)
    }

    fn check(&mut self, now: u64, cost: u32) -> bool {
        for hit in &mut self.hits {
            *hit = now.min(*hit);
        }
        let longest = self.quotas.iter().map(|quota| quota.1).max().unwrap();
        self.hits.retain(|hit| now - hit < longest);
        let allowed = self.fits(now, cost);
        if allowed || self.counts_refusals {
            self.hits.extend((0..cost).map(|_| now));
        }
        allowed
    }

    fn fewest_left(&self, now: u64) -> u32 {
        let left = |quota: &(u32, u64)| quota.0.saturating_sub(self.counting(*quota, now) as u32);
        self.quotas.iter().map(left).min().unwrap()
    }
}

fn sliding(quotas: &[(u32, u64)], counts_refusals: bool) -> SlidingWindow {
    let (limit, window) = quotas[0];
    let first = SlidingWindow::new(quota(limit, window)).unwrap();
    let all = quotas[1..].iter();
    let window = all.fold(first, |all, (limit, window)| {
        all.and(quota(*limit, *window)).unwrap()
    });
    window.refusals(if counts_refusals {
        Refusals::Count
    } else {
        Refusals::Ignore
    })
}

/// Waits exactly as long as a refusal says, to the ms and in whole seconds.
fn the_law<A: Algorithm>(algorithm: &A, state: &A::State, now: u64, refused: &Decision, cost: u32)
where
    A::State: Clone,
{
    let allowed_after = |ms: u64| {
        let decided = algorithm.decide(&mut state.clone(), at(now + ms), cost);
        decided.decision.is_allowed()
    };
    let wait = refused.wait().unwrap().as_millis() as u64;
    assert!(allowed_after(wait));
    assert!(wait == 0 || !allowed_after(wait - 1));
    let seconds = refused.retry_after().unwrap();
    assert!(seconds >= 1);
    assert!(allowed_after(seconds * 1_000));
    assert!(seconds == 1 || !allowed_after((seconds - 1) * 1_000));
    assert!(refused.reset_at() <= at(now + wait));
}

fn quotas() -> impl Strategy<Value = Vec<(u32, u64)>> {
    prop::collection::vec((1_u32..8, 1_u64..9_000), 1..4)
}

proptest! {
    #[test]
    fn a_sliding_window_decides_as_the_plain_one_and_its_waits_are_exact(
        quotas in quotas(),
        counts_refusals: bool,
        steps in prop::collection::vec((-3_000_i64..5_000, 1_u32..8), 1..80),
    ) {
        let window = sliding(&quotas, counts_refusals);
        let largest = quotas.iter().map(|quota| quota.0).max().unwrap() as usize;
        let mut log = Default::default();
        let mut plain = Plain { quotas, counts_refusals, hits: Vec::new() };
        let mut now = 1_000_000_u64;
        for (step, cost) in steps {
            now = now.checked_add_signed(step).unwrap();
            if window.check_cost(cost).is_err() {
                continue;
            }
            let before = window.peek(&log, at(now));
            let decision = window.decide(&mut log, at(now), cost).decision;
            prop_assert_eq!(decision.is_allowed(), plain.check(now, cost));
            prop_assert!(log.times().len() <= largest, "a row cannot grow");
            prop_assert!(before.is_allowed());
            if decision.is_allowed() {
                prop_assert_eq!(decision.remaining(), plain.fewest_left(now));
                prop_assert!(decision.remaining() < before.remaining() || before.limit() != decision.limit());
            } else {
                the_law(&window, &log, now, &decision, cost);
            }
            prop_assert_eq!(window.peek(&log, at(now)).remaining(), plain.fewest_left(now));
        }
    }

    #[test]
    fn a_fixed_window_never_exceeds_its_limit_and_its_waits_are_exact(
        (limit, window_ms) in (1_u32..8, 1_u64..9_000),
        steps in prop::collection::vec((0_u64..5_000, 1_u32..8), 1..80),
    ) {
        let window = FixedWindow::new(quota(limit, window_ms));
        let mut count = Default::default();
        let mut now = 1_000_000_u64;
        let (mut start, mut used) = (None, 0);
        for (step, cost) in steps {
            now += step;
            if window.check_cost(cost).is_err() {
                continue;
            }
            let decision = window.decide(&mut count, at(now), cost).decision;
            if start.is_none_or(|start| now - start >= window_ms) {
                (start, used) = (Some(now), 0);
            }
            prop_assert_eq!(decision.is_allowed(), used + cost <= limit);
            used += if decision.is_allowed() { cost } else { 0 };
            prop_assert_eq!(decision.remaining(), limit - used);
            prop_assert_eq!(decision.reset_at(), at(start.unwrap() + window_ms));
            if !decision.is_allowed() {
                the_law(&window, &count, now, &decision, cost);
            }
        }
    }

    #[test]
    fn no_input_makes_a_decision_panic(
        limit in 1_u32..,
        window_ms in 1_u64..=315_360_000_000,
        steps in prop::collection::vec((any::<u64>(), any::<u32>()), 1..20),
    ) {
        let fixed = FixedWindow::new(quota(limit, window_ms));
        let sliding = SlidingWindow::new(quota(limit % 1_000 + 1, window_ms)).unwrap();
        let (mut count, mut log) = Default::default();
        for (now, cost) in steps {
            let _ = (fixed.decide(&mut count, at(now), cost), fixed.peek(&count, at(now)));
            let _ = (sliding.decide(&mut log, at(now), cost), sliding.peek(&log, at(now)));
        }
    }
}

#[test]
fn a_cost_that_can_never_fit_is_an_error() {
    let window = sliding(&[(10, 1_000), (3, 60_000)], true);
    for cost in [0, 4, 10, u32::MAX] {
        match window.check_cost(cost).unwrap_err() {
            Error::InvalidCost { cost: named, limit } => assert_eq!((named, limit), (cost, 3)),
            error => panic!("{error}"),
        }
    }
    window.check_cost(3).unwrap();
    let fixed = FixedWindow::new(quota(u32::MAX, 1));
    fixed.check_cost(u32::MAX).unwrap();
    fixed.check_cost(0).unwrap_err();
}

#[test]
fn the_log_has_a_largest_limit_and_the_fixed_window_none() {
    SlidingWindow::new(quota(100_000, 1)).unwrap();
    let too_large = SlidingWindow::new(quota(100_001, 1)).unwrap_err();
    assert!(too_large.to_string().contains("100001"), "{too_large}");
    SlidingWindow::new(quota(1, 1))
        .unwrap()
        .and(quota(100_001, 1))
        .unwrap_err();
}

#[test]
fn several_quotas_have_a_text_form() {
    let window: SlidingWindow = "5/minute; 100/day".parse().unwrap();
    assert_eq!(
        window.quotas(),
        ["5/minute".parse().unwrap(), "100/day".parse().unwrap()]
    );
    assert_eq!(window.to_string(), "5/minute; 100/day");
    for bad in [
        "",
        "5/minute;",
        "5/minute,100/day",
        "5/minute; ",
        "; 5/minute",
        "100001/day",
    ] {
        bad.parse::<SlidingWindow>().unwrap_err();
    }
    let fixed: FixedWindow = "5/minute".parse().unwrap();
    assert_eq!(fixed.to_string(), "5/minute");
}
