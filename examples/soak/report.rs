//! What is printed: the counts so far, and how large file and memory were.

use std::fmt;
use std::io::{self, Write};

use crate::Kind;
use crate::run::Run;

/// What happened.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) checks: u64,
    pub(crate) restarts: u64,
    pub(crate) kills: u64,
    pub(crate) steps: u64,
    pub(crate) faults: u64,
    pub(crate) lost: u64,
    pub(crate) wrong: u64,
}

impl Tally {
    const fn and(self, other: Self) -> Self {
        Self {
            checks: self.checks + other.checks,
            restarts: self.restarts + other.restarts,
            kills: self.kills + other.kills,
            steps: self.steps + other.steps,
            faults: self.faults + other.faults,
            lost: self.lost + other.lost,
            wrong: self.wrong + other.wrong,
        }
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            checks,
            restarts,
            kills,
            steps,
            faults,
            lost,
            wrong,
        } = self;
        write!(
            f,
            "checks {checks}, restarts {restarts}, kills {kills}, clock steps {steps}, faults {faults}, \
             lost {lost}, wrong {wrong}"
        )
    }
}

/// The most of a while, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sizes {
    pub(crate) file: u64,
    pub(crate) memory: u64,
}

impl Sizes {
    pub(crate) fn most(self, other: Self) -> Self {
        Self {
            file: self.file.max(other.file),
            memory: self.memory.max(other.memory),
        }
    }

    /// Whether the file is more than twice what it was `before`, since it grows by doubling, or the
    /// memory, whose peak depends on for how long the disk refused; and more than 8 MB, which is noise.
    const fn has_outgrown(self, before: Self) -> bool {
        const NOISE: u64 = 8_000_000;
        self.file > 2 * before.file + NOISE || self.memory > 2 * before.memory + NOISE
    }
}

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let megabytes = |bytes: u64| bytes as f64 / 1e6;
        let (file, memory) = (megabytes(self.file), megabytes(self.memory));
        write!(f, "file {file:.1} MB, memory {memory:.0} MB")
    }
}

/// What both runs came to, minute by minute.
#[derive(Debug, Default)]
pub(crate) struct Report {
    minutes: Vec<[Sizes; 2]>,
}

impl Report {
    /// Prints a line for each run: its counts so far, and the sizes of the minute that is over.
    pub(crate) fn minute(&mut self, runs: &[Run; 2]) -> io::Result<()> {
        let sizes = runs.each_ref().map(Run::take_sizes);
        self.minutes.push(sizes);
        let minute = self.minutes.len();
        for (run, sizes) in runs.iter().zip(sizes) {
            line(format_args!(
                "minute {minute}, {}: {}, {sizes}",
                run.kind.name(),
                run.tally()
            ))?;
        }
        Ok(())
    }

    /// Prints a line for each run and one for both, and says whether all was well.
    pub(crate) fn end(mut self, runs: &[Run; 2]) -> io::Result<bool> {
        self.minutes.push(runs.each_ref().map(Run::take_sizes));
        let mut all = (Tally::default(), Sizes::default());
        for (at, run) in runs.iter().enumerate() {
            let of_run = self.minutes.iter().filter_map(|sizes| sizes.get(at));
            let sizes = of_run.fold(Sizes::default(), |most, sizes| most.most(*sizes));
            line(format_args!(
                "in all, {}: {}, {sizes}",
                run.kind.name(),
                run.tally()
            ))?;
            all = (all.0.and(run.tally()), all.1.most(sizes));
        }
        line(format_args!("in all: {}, {}", all.0, all.1))?;
        let has_grown = [Kind::Committed, Kind::Buffered].map(|kind| self.has_grown(kind));
        if has_grown.contains(&true) {
            line(format_args!("file or memory grew after the second minute"))?;
        }
        Ok(all.0.lost == 0 && all.0.wrong == 0 && !has_grown.contains(&true))
    }

    fn has_grown(&self, kind: Kind) -> bool {
        let mut sizes = self.minutes.iter().skip(1).filter_map(|sizes| match kind {
            Kind::Committed => sizes.first(),
            Kind::Buffered => sizes.last(),
        });
        let Some(second) = sizes.next() else {
            return false;
        };
        sizes.any(|later| later.has_outgrown(*second))
    }
}

/// Prints a line. If nobody reads, the code at the end still says how it went.
fn line(text: fmt::Arguments<'_>) -> io::Result<()> {
    crate::cli::still_read(writeln!(io::stdout().lock(), "{text}")).map(drop)
}
