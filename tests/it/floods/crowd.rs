//! Clients that come once, many more than a table may hold.

use std::net::Ipv4Addr;
use std::path::Path;
use std::time::{Duration, Instant};

use ratevault::{Decision, Durability, HitLog, Limiter, Pending, Quota, SlidingWindow, Vault};

use super::{Cost, flood, is_flooded, latencies, peak_memory, say};
use crate::support::single_threaded;

/// A flood, as it goes over a table.
#[derive(Clone, Copy, Debug)]
struct Crowd {
    /// The test that is its process.
    process: &'static str,
    durability: Durability,
    clients: u32,
    max_keys: u32,
    /// How much memory the process may hold: what rows and cached pages may take, and 64 MiB.
    memory: u64,
}

/// How much memory the rows of the buffered table may take.
const BUFFER: usize = 32 << 20;

/// How much the pages of a file may take by default.
const CACHE: u64 = 32 << 20;

const BUFFERED: Crowd = Crowd {
    process: "crowd::a_million_come_to_a_buffered_table",
    durability: Durability::Buffered {
        flush_every: Duration::from_millis(100),
    },
    clients: 1_000_000,
    max_keys: 100_000,
    memory: CACHE + BUFFER as u64 + (64 << 20),
};

const COMMITTED: Crowd = Crowd {
    process: "crowd::a_hundred_thousand_come_to_a_committed_table",
    durability: Durability::Committed,
    clients: 100_000,
    max_keys: 10_000,
    memory: CACHE + (64 << 20),
};

/// How many clients wait together.
const TOGETHER: u32 = 1_000;

#[test]
#[ignore = "a process of other tests"]
fn a_million_come_to_a_buffered_table() {
    BUFFERED.come();
}

#[test]
#[ignore = "a process of other tests"]
fn a_hundred_thousand_come_to_a_committed_table() {
    COMMITTED.come();
}

#[test]
#[ignore = "takes a minute"]
fn a_million_clients_that_come_once_cost_a_buffered_table_no_more_than_its_bound() {
    BUFFERED.bear();
}

#[test]
#[ignore = "takes a quarter of a minute"]
fn a_hundred_thousand_clients_that_come_once_cost_a_committed_table_no_more_than_its_bound() {
    COMMITTED.bear();
}

impl Crowd {
    fn open(&self, path: &Path) -> Limiter<SlidingWindow> {
        let vault = Vault::<HitLog>::builder("crowd").path(path);
        let vault = vault.max_keys(self.max_keys.into());
        let vault = match self.durability {
            Durability::Buffered { .. } => vault.buffer_bytes(BUFFER),
            _ => vault,
        };
        let vault = vault.durability(self.durability).open().unwrap();
        Limiter::new(
            vault,
            SlidingWindow::new(Quota::per_day(5).unwrap()).unwrap(),
        )
    }

    /// Comes, and says what it cost once the table had been turned over twice, and at the end.
    fn come(&self) {
        if !is_flooded() {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vault.redb");
        let limiter = self.open(&path);
        let cost = || Cost {
            memory: peak_memory(),
            file: path.metadata().unwrap().len(),
        };
        let mut took = Vec::new();
        for first in (0..self.clients).step_by(TOGETHER as usize) {
            took.extend(self.come_together(&limiter, first));
            if first + TOGETHER == 2 * self.max_keys {
                limiter.vault().flush().unwrap();
                cost().say();
            }
        }
        limiter.vault().flush().unwrap();
        cost().say();
        say(latencies(took));
        let stats = limiter.vault().stats().unwrap();
        assert_eq!(stats.rows, u64::from(self.max_keys));
        assert_eq!(stats.evicted, u64::from(self.clients - self.max_keys));
    }

    /// Some check for the first time, and are told so. How long each waited.
    fn come_together(&self, limiter: &Limiter<SlidingWindow>, first: u32) -> Vec<Duration> {
        let clients = (first..first + TOGETHER).map(|client| Ipv4Addr::from(client).to_string());
        match self.durability {
            Durability::Committed => {
                let begun = Instant::now();
                let checks = clients.map(|client| limiter.check_async("login", &client));
                let checks: Vec<_> = checks.collect();
                let runtime = single_threaded();
                let wait = |check: Pending<Decision>| {
                    let decision = runtime.block_on(check).unwrap();
                    assert_eq!(decision.remaining(), 4);
                    begun.elapsed()
                };
                checks.into_iter().map(wait).collect()
            }
            _ => {
                let check = |client: String| {
                    let begun = Instant::now();
                    let decision = limiter.check("login", &client).unwrap();
                    assert_eq!(decision.remaining(), 4);
                    begun.elapsed()
                };
                clients.map(check).collect()
            }
        }
    }

    fn bear(&self) {
        let said = flood(self.process);
        let (full, end) = (Cost::heard(&said[0]), Cost::heard(&said[1]));
        println!(
            "{:?}, {} clients, at most {} rows: {end} (turned over twice: {full}); {}",
            self.durability, self.clients, self.max_keys, said[2]
        );
        assert!(end.memory <= self.memory, "{end}");
        // A row of one hit takes about 150 bytes; the file grows by doubling. Had each client left
        // half of its row behind, it would be more.
        assert!(end.file <= u64::from(self.max_keys) * 600, "{end}");
    }
}
