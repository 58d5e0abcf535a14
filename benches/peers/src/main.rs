//! `peers`: what ratevault costs beside other rate limiters, on the same work in the same run.
//!
//! ```text
//! cargo run --release --manifest-path benches/peers/Cargo.toml -- --only http
//! ```
//!
//! The peers take turns, and a figure is the median over the rounds: a machine is faster in one
//! minute than in the next. Compare figures of one run only.
#![expect(
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a benchmark has no caller that could handle an error, and prints its figures"
)]

mod http;
mod report;
mod turns;

use std::fs;
use std::path::Path;

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

    /// Fewer and shorter rounds
    #[arg(long)]
    quick: bool,

    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
}

/// The benchmarks, in the order they run in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Bench {
    /// Requests through the tower layer
    Http,
}

fn main() {
    let peers = Peers::parse();
    let effort = if peers.quick {
        Effort::QUICK
    } else {
        Effort::FULL
    };
    let mut report = Report::new(peers.json);
    for bench in Bench::value_variants() {
        if peers.only.is_empty() || peers.only.contains(bench) {
            bench.run(effort, &mut report);
        }
    }
}

impl Bench {
    fn run(self, effort: Effort, report: &mut Report) {
        match self {
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
