//! `peers`: what ratevault costs beside other rate limiters, on the same work in the same run.
//!
//! ```text
//! cargo run --release --manifest-path benches/peers/Cargo.toml -- --quick
//! ```
//!
//! The peers take turns, as a machine is faster in one minute than in the next. Compare figures of one
//! run only, and run it while nothing else does.
#![expect(
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a benchmark has no caller that could handle an error, and prints its figures"
)]

mod child;
mod decisions;
mod governed;
mod http;
mod latency;
mod load;
mod memory;
mod open;
mod ours;
mod report;
mod sqlite;
mod turns;

use std::fs;
use std::io;
use std::path::Path;

use child::Child;
use clap::{Parser, ValueEnum};
use report::Report;
use tempfile::TempDir;
use turns::Effort;

/// Measure ratevault beside other rate limiters.
#[derive(Parser, Debug)]
#[command(name = "peers")]
struct Peers {
    /// Only this benchmark; may be repeated
    #[arg(long, value_enum, value_name = "BENCH")]
    only: Vec<Bench>,

    /// Fewer and shorter rounds, and no requests unless asked for: three minutes on two cores
    #[arg(long)]
    quick: bool,

    /// Print one JSON object a line
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    child: Child,
}

/// The benchmarks, in the order they run in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Bench {
    /// Decisions in memory, beside governor
    Decisions,
    /// Decisions on disk, beside SQLite
    Committed,
    /// Short lists of hits and long ones
    Limits,
    /// Memory and room on disk per client
    Memory,
    /// Opening a file after kill -9
    Open,
    /// Single checks at rest, during flushes and during a sweep
    Latency,
    /// Requests through the tower layer
    Http,
}

fn main() -> io::Result<()> {
    let peers = Peers::parse();
    if peers.child.run() {
        return Ok(());
    }
    match peers.run() {
        // Whoever read has read enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        ended => ended,
    }
}

impl Peers {
    fn run(&self) -> io::Result<()> {
        let effort = if self.quick {
            Effort::QUICK
        } else {
            Effort::FULL
        };
        let mut report = Report::new(self.json);
        for bench in Bench::value_variants() {
            if self.is_wanted(*bench) {
                bench.run(effort, &mut report)?;
            }
        }
        report.conclude()
    }

    fn is_wanted(&self, bench: Bench) -> bool {
        if self.only.is_empty() {
            return !self.quick || bench != Bench::Http;
        }
        self.only.contains(&bench)
    }
}

impl Bench {
    fn run(self, effort: Effort, report: &mut Report) -> io::Result<()> {
        match self {
            Self::Decisions => decisions::in_memory(effort, report),
            Self::Committed => decisions::on_disk(effort, report),
            Self::Limits => decisions::limits(effort, report),
            Self::Memory => memory::run(report),
            Self::Open => open::run(report),
            Self::Latency => latency::run(effort, report),
            Self::Http => http::run(effort, report),
        }
    }
}

/// A new directory in `target/`: on a disk, unlike the system's temporary directory on many
/// systems.
fn folder() -> TempDir {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("target");
    fs::create_dir_all(&target).expect("the target directory");
    tempfile::Builder::new()
        .prefix("peers-")
        .tempdir_in(target)
        .expect("a directory")
}
