//! What a flood has the bound forget: a client at its limit, and how many newcomers that takes.

use std::sync::Arc;
use std::time::Duration;

use ratevault::{
    Algorithm, Decision, Durability, FixedWindow, Limiter, ManualClock, Quota, Refusals,
    SlidingWindow, Vault,
};

use crate::support::{manual_clock, single_threaded};

const MAX_KEYS: u32 = 1_000;

/// How many newcomers come at a time.
const TOGETHER: u32 = 20;

/// After how many newcomers a client counts as not forgotten.
const FLOOD: u32 = 5 * MAX_KEYS;

const RARELY: Durability = Durability::Buffered {
    flush_every: Duration::from_secs(3_600),
};

const DURABILITIES: [Durability; 2] = [Durability::Committed, RARELY];

/// What the client does while the flood is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Client {
    Pauses,
    Hammers,
}

/// A full table on a clock that stands.
struct Full<A: Algorithm> {
    limiter: Limiter<A>,
    clock: Arc<ManualClock>,
    came: u32,
}

impl<A: Algorithm> Full<A> {
    fn new(algorithm: A, durability: Durability) -> Self {
        let clock = manual_clock();
        let vault = Vault::builder("flooded").in_memory();
        let vault = vault.durability(durability).clock(clock.clone());
        let vault = vault.max_keys(MAX_KEYS.into()).background_sweep(false);
        let mut full = Self {
            limiter: Limiter::new(vault.open().unwrap(), algorithm),
            clock,
            came: 0,
        };
        while full.came < MAX_KEYS {
            full.newcomers();
        }
        full
    }

    /// The next newcomers of the flood.
    fn newcomers(&mut self) {
        self.clock.advance(Duration::from_millis(1));
        let names: Vec<_> = (self.came..self.came + TOGETHER)
            .map(|name| name.to_string())
            .collect();
        assert_eq!(self.allowed_of(&names), names.len());
        self.came += TOGETHER;
        self.limiter.vault().flush().unwrap();
    }

    /// How many are allowed of some who check together.
    fn allowed_of(&self, names: &[String]) -> usize {
        let check = |name| self.limiter.check_async("login", name);
        let checks: Vec<_> = names.iter().map(check).collect();
        let runtime = single_threaded();
        let answers = checks
            .into_iter()
            .map(|check| runtime.block_on(check).unwrap());
        answers.filter(Decision::is_allowed).count()
    }

    fn is_refused(&self, client: &str) -> bool {
        !self.limiter.check("login", client).unwrap().is_allowed()
    }

    /// Brings a client to its limit.
    fn exhaust(&self, client: &str) {
        while !self.is_refused(client) {}
        self.limiter.vault().flush().unwrap();
    }

    /// How many newcomers it takes until a client at its limit is forgotten.
    fn forgotten_after(&mut self, client: Client) -> Option<u32> {
        self.exhaust("ada");
        let before = self.came;
        while self.came - before < FLOOD {
            self.newcomers();
            let is_forgotten = match client {
                Client::Pauses => self.limiter.peek("login", "ada").unwrap().remaining() > 0,
                Client::Hammers => !self.is_refused("ada"),
            };
            if is_forgotten {
                return Some(self.came - before);
            }
        }
        None
    }
}

/// Asserts that it takes about as many newcomers as the table has rows.
#[track_caller]
fn about_max_keys(what: &str, newcomers: Option<u32>) {
    let newcomers = newcomers.unwrap_or(u32::MAX);
    let share = f64::from(newcomers) / f64::from(MAX_KEYS);
    println!("{what}: forgotten after {newcomers} newcomers, {share:.2} x max_keys");
    assert!((0.95..=1.05).contains(&share), "{what}: {share}");
}

fn sliding(refusals: Refusals) -> SlidingWindow {
    let window = SlidingWindow::new(Quota::per_hour(5).unwrap()).unwrap();
    window.refusals(refusals)
}

#[test]
fn a_client_at_its_limit_that_pauses_is_forgotten_after_about_max_keys_newcomers() {
    for durability in DURABILITIES {
        for refusals in [Refusals::Count, Refusals::Ignore] {
            let newcomers =
                Full::new(sliding(refusals), durability).forgotten_after(Client::Pauses);
            about_max_keys(&format!("sliding, {refusals:?}, {durability:?}"), newcomers);
        }
        let fixed = FixedWindow::new(Quota::per_hour(5).unwrap());
        let newcomers = Full::new(fixed, durability).forgotten_after(Client::Pauses);
        about_max_keys(&format!("fixed, {durability:?}"), newcomers);
    }
}

#[test]
fn a_client_at_its_limit_that_hammers_is_refused_through_any_flood_if_refusals_count() {
    for durability in DURABILITIES {
        let mut full = Full::new(sliding(Refusals::Count), durability);
        assert_eq!(
            full.forgotten_after(Client::Hammers),
            None,
            "{durability:?}"
        );
        assert!(full.limiter.vault().stats().unwrap().evicted >= FLOOD.into());
    }
}

#[test]
fn hammering_neither_helps_nor_hurts_where_refusals_leave_nothing() {
    for durability in DURABILITIES {
        let ignored = sliding(Refusals::Ignore);
        let newcomers = Full::new(ignored, durability).forgotten_after(Client::Hammers);
        about_max_keys(&format!("sliding, Ignore, {durability:?}"), newcomers);
        let fixed = FixedWindow::new(Quota::per_hour(5).unwrap());
        let newcomers = Full::new(fixed, durability).forgotten_after(Client::Hammers);
        about_max_keys(&format!("fixed, {durability:?}"), newcomers);
    }
}

/// As many as an eviction looks at, so that the client comes next.
const DECOYS: u32 = 64;

#[test]
fn others_that_hammer_too_do_not_have_a_client_forgotten_that_was_refused_last() {
    for durability in DURABILITIES {
        let mut full = Full::new(sliding(Refusals::Count), durability);
        let decoys: Vec<_> = (0..DECOYS).map(|decoy| format!("decoy {decoy}")).collect();
        decoys.iter().for_each(|decoy| full.exhaust(decoy));
        full.clock.advance(Duration::from_millis(1));
        full.exhaust("ada");
        let before = full.came;
        while full.came - before < 2 * MAX_KEYS {
            full.newcomers();
            full.clock.advance(Duration::from_millis(1));
            full.allowed_of(&decoys);
            full.clock.advance(Duration::from_millis(1));
            assert!(full.is_refused("ada"), "{} newcomers", full.came - before);
        }
    }
}
