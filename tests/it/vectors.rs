//! Every decision must be what the shared traces say, through a real vault on disk.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ratevault::{
    Algorithm, Decision, Durability, Error, FixedWindow, Limiter, ManualClock, Quota, Refusals,
    SlidingWindow, Timestamp, Vault,
};
use serde::Deserialize;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Trace {
    name: String,
    algorithm: String,
    refusals: String,
    quotas: Vec<(u32, u64)>,
    #[serde(rename = "why")]
    _why: String,
    steps: Vec<Step>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Step {
    op: String,
    at: u64,
    #[serde(default = "login")]
    endpoint: String,
    #[serde(default = "somebody")]
    client: String,
    #[serde(default = "one")]
    cost: u32,
    expect: Option<Expect>,
}

fn login() -> String {
    "login".into()
}

fn somebody() -> String {
    "203.0.113.7".into()
}

const fn one() -> u32 {
    1
}

#[derive(Debug, Deserialize, PartialEq)]
#[serde(untagged, deny_unknown_fields)]
enum Expect {
    Error {
        error: bool,
    },
    Checked {
        allowed: bool,
        limit: u32,
        remaining: u32,
        reset_ms: u64,
        retry_after: Option<u64>,
    },
    Peeked {
        limit: u32,
        remaining: u32,
        reset_ms: u64,
    },
}

#[test]
fn decision_vectors() {
    every_trace_agrees(Durability::Committed);
}

#[test]
fn decision_vectors_of_a_buffered_table() {
    let flush_every = Duration::from_secs(3_600);
    every_trace_agrees(Durability::Buffered { flush_every });
    // Flushes come and go between the steps.
    let flush_every = Duration::from_millis(1);
    every_trace_agrees(Durability::Buffered { flush_every });
}

fn every_trace_agrees(durability: Durability) {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/decisions.json");
    let mut files = vec![own];
    if let Some(folder) = std::env::var_os("RATEVAULT_VECTORS") {
        files.push(PathBuf::from(folder).join("decisions.json"));
    }
    for file in files {
        let text = fs::read_to_string(&file).unwrap_or_else(|error| panic!("{file:?}: {error}"));
        let traces: Vec<Trace> = serde_json::from_str(&text).unwrap();
        assert!(!traces.is_empty());
        let next = std::sync::atomic::AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while let Some(trace) =
                        traces.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed))
                    {
                        trace.run(durability);
                    }
                });
            }
        });
        println!("decisions: {}", traces.len());
    }
}

impl Trace {
    fn run(&self, durability: Durability) {
        let quotas = self
            .quotas
            .iter()
            .map(|(limit, window)| Quota::new(*limit, Duration::from_millis(*window)).unwrap());
        let quotas: Vec<Quota> = quotas.collect();
        match (&*self.algorithm, &*self.refusals) {
            ("fixed", "ignore") => {
                assert_eq!(quotas.len(), 1);
                self.run_with(&FixedWindow::new(quotas[0]), durability);
            }
            ("sliding", refusals) => {
                let window = SlidingWindow::new(quotas[0]).unwrap();
                let rest = quotas[1..].iter();
                let window = rest.fold(window, |window, quota| window.and(*quota).unwrap());
                let window = window.refusals(match refusals {
                    "count" => Refusals::Count,
                    "ignore" => Refusals::Ignore,
                    other => panic!("{other}"),
                });
                self.run_with(&window, durability);
            }
            other => panic!("{other:?}"),
        }
    }

    fn run_with<A: Algorithm + Clone>(&self, algorithm: &A, durability: Durability) {
        let directory = tempfile::tempdir().unwrap();
        let clock = Arc::new(ManualClock::default());
        let open = || {
            let vault = Vault::builder("rate_limits")
                .path(directory.path().join("vault.redb"))
                .clock(clock.clone())
                .durability(durability)
                .background_sweep(false);
            Limiter::new(vault.open().unwrap(), algorithm.clone())
        };
        let mut limiter = open();
        for (number, step) in self.steps.iter().enumerate() {
            clock.set(Timestamp::from_millis(step.at));
            let found = match &*step.op {
                "check" => Some(checked(limiter.check_n(
                    &step.endpoint,
                    &step.client,
                    step.cost,
                ))),
                "peek" => Some(peeked(&limiter.peek(&step.endpoint, &step.client).unwrap())),
                "reset" => {
                    limiter.reset(&step.endpoint, &step.client).unwrap();
                    None
                }
                "reopen" => {
                    limiter.vault().close().unwrap();
                    limiter = open();
                    None
                }
                other => panic!("{other}"),
            };
            assert_eq!(found, step.expect, "{}, step {number}", self.name);
        }
    }
}

fn checked(decision: Result<Decision, Error>) -> Expect {
    match decision {
        Ok(decision) => Expect::Checked {
            allowed: decision.is_allowed(),
            limit: decision.limit(),
            remaining: decision.remaining(),
            reset_ms: decision.reset_after().as_millis() as u64,
            retry_after: decision.retry_after(),
        },
        Err(Error::InvalidCost { .. }) => Expect::Error { error: true },
        Err(error) => panic!("{error}"),
    }
}

fn peeked(decision: &Decision) -> Expect {
    Expect::Peeked {
        limit: decision.limit(),
        remaining: decision.remaining(),
        reset_ms: decision.reset_after().as_millis() as u64,
    }
}
