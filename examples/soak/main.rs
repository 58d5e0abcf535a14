//! Checks for a long time, through restarts, `kill -9`, a clock that is set and a disk that refuses, and
//! compares every answer with what it had to be.
//!
//! ```text
//! cargo run --release --example soak -- --seconds 60
//! ```

#[path = "../cli/mod.rs"]
mod cli;
mod clock;
mod event;
mod faults;
mod model;
mod report;
mod run;
mod worker;

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use ratevault::Durability;

use crate::clock::SteppedClock;
use crate::report::Report;
use crate::run::Run;
use crate::worker::Worker;

const MINUTE: Duration = Duration::from_secs(60);

/// Check limits for a while, through all that may happen to a service, and compare every answer with a
/// model.
///
/// For each durability a child process checks by sixteen threads, in a file of its own, and says every
/// answer to this one. Meanwhile the file is closed and opened again, the clock is set back and forth by
/// up to half a minute, the disk refuses every write for a moment (Linux only: by the limit on the size of
/// a process's files), and the child is killed with SIGKILL and started anew, after at most a minute.
///
/// "lost" counts the answered hits that were not there after a kill although the file had to have them:
/// all of a committed table, those from before the last completed flush of a buffered one. "wrong" counts the
/// answers and the rows that are not what the model says, and errors that nothing explains. A line is printed
/// for every minute and at the end. "file" is its largest size, "memory" the most that a child held, in that
/// minute. From the third minute on the file may be twice as large as in the second, since it grows by doubling,
/// and the memory too, since its peak depends on for how long the disk refused; and both 8 MB more.
///
/// Ends with 0 if nothing was lost, wrong or grown, 1 if something was, 2 on a usage error, 3 on any other.
#[derive(Parser, Debug)]
#[command(name = "soak")]
struct Soak {
    /// For how long
    #[arg(long, default_value_t = 60)]
    seconds: u64,

    /// Print what the library logs, much of it about faults that were meant
    #[arg(long)]
    verbose: bool,

    /// Work as a child in this file
    #[arg(long, hide = true)]
    child: Option<PathBuf>,

    /// Only say what is there
    #[arg(long, hide = true)]
    look: bool,

    #[arg(long, hide = true, value_enum, default_value_t = Kind::Committed)]
    durability: Kind,

    /// How many ms the clock is ahead
    #[arg(long, hide = true, default_value_t = 0, allow_negative_numbers = true)]
    offset: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    Committed,
    Buffered,
}

impl Kind {
    const fn name(self) -> &'static str {
        match self {
            Self::Committed => "committed",
            Self::Buffered => "buffered",
        }
    }
}

impl From<Kind> for Durability {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::Committed => Self::Committed,
            Kind::Buffered => Self::Buffered {
                flush_every: Duration::from_millis(250),
            },
        }
    }
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() -> ExitCode {
    cli::quiet_storage();
    let soak = Soak::parse();
    if soak.verbose {
        tracing_subscriber::fmt().with_writer(io::stderr).init();
    }
    let done = match &soak.child {
        Some(path) => soak.work(path).map(|()| true),
        None => soak.run(),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => cli::failure("soak", error),
    }
}

impl Soak {
    fn work(&self, path: &Path) -> Result<(), Failure> {
        let worker = Worker {
            path: path.to_owned(),
            durability: self.durability.into(),
            clock: Arc::new(SteppedClock::new(self.offset)),
        };
        if self.look {
            worker.look()?.close()?;
            return Ok(());
        }
        worker.run()
    }

    /// Whether all was well.
    fn run(&self) -> Result<bool, Failure> {
        let folder = tempfile::tempdir()?;
        let end = Instant::now() + Duration::from_secs(self.seconds);
        let runs = [Kind::Committed, Kind::Buffered]
            .map(|kind| Run::new(folder.path(), kind, end, self.verbose));
        let mut report = Report::default();
        thread::scope(|scope| {
            let (ended, both_ended) = channel::<()>();
            let running = runs.each_ref().map(|run| {
                let ended = ended.clone();
                scope.spawn(move || {
                    let done = run.run();
                    drop(ended);
                    done
                })
            });
            drop(ended);
            // It is disconnected when both have ended.
            while both_ended.recv_timeout(MINUTE) == Err(RecvTimeoutError::Timeout) {
                report.minute(&runs)?;
            }
            for run in running {
                match run.join() {
                    Ok(done) => done?,
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            report.end(&runs).map_err(Failure::from)
        })
    }
}

/// A number below `bound` by chance.
fn below(bound: u64) -> u64 {
    RandomState::new().hash_one(bound) % bound
}
