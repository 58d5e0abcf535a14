//! The load: threads that check clients at random, the same ones for each peer.

use std::net::Ipv4Addr;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How often it is looked whether a turn is over.
const LOOK: Duration = Duration::from_millis(5);

/// A limiter that threads check clients with.
pub(crate) trait Limit: Sync {
    /// What each thread has of its own.
    type Hand;

    fn hand(&self) -> Self::Hand;

    /// Whether the client is let in.
    #[expect(
        clippy::ptr_arg,
        reason = "governor's keys are of this type, and asked for by reference"
    )]
    fn allows(&self, hand: &mut Self::Hand, client: &String) -> bool;

    /// How many checks a thread does before it looks whether the turn is over.
    fn batch(&self) -> u64;
}

/// What threads got done.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Done {
    pub(crate) checks: u64,
    pub(crate) allowed: u64,
    /// By the clock on the wall, however many threads there were.
    pub(crate) seconds: f64,
}

impl Done {
    pub(crate) fn add(&mut self, other: Self) {
        self.checks += other.checks;
        self.allowed += other.allowed;
        self.seconds += other.seconds;
    }
}

/// Has threads check clients until `is_over`, which is told for how long they did.
pub(crate) fn hammer<L: Limit>(
    limit: &L,
    threads: usize,
    clients: &[String],
    mut is_over: impl FnMut(Duration) -> bool,
) -> Done {
    let (gate, stop) = (Barrier::new(threads + 1), AtomicBool::new(false));
    let work = |number| {
        let (mut hand, mut draw) = (limit.hand(), Draw::new(number));
        let (mut checks, mut allowed) = (0, 0);
        gate.wait();
        while !stop.load(Ordering::Relaxed) {
            for _ in 0..limit.batch() {
                allowed += u64::from(limit.allows(&mut hand, draw.one_of(clients)));
            }
            checks += limit.batch();
        }
        (checks, allowed)
    };
    thread::scope(|scope| {
        let work = &work;
        let spawn = |number| scope.spawn(move || work(number));
        let threads: Vec<_> = (1..).take(threads).map(spawn).collect();
        gate.wait();
        let started = Instant::now();
        while !is_over(started.elapsed()) {
            thread::sleep(LOOK);
        }
        stop.store(true, Ordering::Relaxed);
        let mut done = Done::default();
        for thread in threads {
            let (checks, allowed) = thread.join().expect("a thread whose checks are answered");
            done.checks += checks;
            done.allowed += allowed;
        }
        done.seconds = started.elapsed().as_secs_f64();
        done
    })
}

/// A cheap generator: xorshift.
#[derive(Debug)]
pub(crate) struct Draw(u64);

impl Draw {
    pub(crate) const fn new(number: u64) -> Self {
        Self(number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    #[inline(always)]
    pub(crate) fn one_of<'t, T>(&mut self, all: &'t [T]) -> &'t T {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        let position = ((self.0 >> 32) * all.len() as u64) >> 32;
        let drawn = usize::try_from(position).ok().and_then(|at| all.get(at));
        drawn.expect("less than their number")
    }
}

/// So many clients, far apart from each other as they are when people come.
pub(crate) fn clients(count: u32) -> impl Iterator<Item = String> {
    // The factor is odd, so that no two share an address.
    let client = |number: u32| Ipv4Addr::from_bits(number.wrapping_mul(0x9e37_79b1)).to_string();
    (0..count).map(client)
}
