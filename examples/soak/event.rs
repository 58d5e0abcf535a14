//! What the two processes say to each other, one JSON object a line, and the limits they speak of.

use std::io::{self, Write};
use std::time::Duration;

use ratevault::{
    Decision, FixedWindow, HitLog, Quota, Refusals, Result, SlidingWindow, Timestamp, WindowCount,
};
use serde::{Deserialize, Serialize};

/// How many threads check in a child.
pub(crate) const THREADS: u32 = 16;

/// How many clients each table has.
pub(crate) const CLIENTS: u32 = 1_000;

/// How many rows the table of clients that come once may have.
pub(crate) const CROWD: u64 = 10_000;

/// The tables of which a model is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Table {
    Counted,
    Ignored,
    Fixed,
}

impl Table {
    pub(crate) const ALL: [Self; 3] = [Self::Counted, Self::Ignored, Self::Fixed];
}

/// Two quotas on one log; refused checks count.
pub(crate) fn counted() -> Result<SlidingWindow> {
    "5/2 seconds; 20/20 seconds".parse()
}

pub(crate) fn ignored() -> Result<SlidingWindow> {
    let window: SlidingWindow = "10/5 seconds".parse()?;
    Ok(window.refusals(Refusals::Ignore))
}

pub(crate) fn fixed() -> Result<FixedWindow> {
    "10/5 seconds".parse()
}

/// The limit of the one client that all threads check at once: it outlasts every run.
pub(crate) fn hot() -> Result<FixedWindow> {
    let ten_years = Duration::from_secs(3_650 * 86_400);
    Ok(FixedWindow::new(Quota::new(u32::MAX, ten_years)?))
}

/// The limit of clients that come once.
pub(crate) fn crowd() -> Result<SlidingWindow> {
    "5/minute".parse()
}

/// What the parent tells the child to do.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum Command {
    Flush,
    /// Set the clock: so many ms ahead of the system's, or behind.
    Step(i64),
    /// Close the file, and open it again.
    Reopen,
}

/// What the child says.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Event {
    /// A row that is there: all of them before `Opened`, later one that a failed check was about.
    Found {
        table: Table,
        client: u32,
        held: Option<Held>,
        now: u64,
    },
    /// What the hot client has used.
    HotFound(u32),
    /// The file is open, all rows were said.
    Opened {
        now: u64,
    },
    Answered(Answer),
    /// How many places the hot client was answered to have used.
    HotAnswered(u32),
    /// So many clients that came once were admitted as such.
    Newcomers(u64),
    /// A check failed, as it may while the disk does; what came of it follows.
    Failed,
    /// A flush begins: it carries what was answered before.
    Begin,
    End,
    NotFlushed,
    /// The clock was set: the latest instant that it had shown, what it shows, and how far it is ahead.
    Stepped {
        peak: u64,
        now: u64,
        offset: i64,
    },
    Reopened,
    /// Something that must not be.
    Wrong(String),
}

/// A row's value.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Held {
    Log(HitLog),
    Count(WindowCount),
}

/// What a check was answered.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Answer {
    pub(crate) table: Table,
    pub(crate) client: u32,
    pub(crate) now: u64,
    pub(crate) said: Said,
}

/// The numbers of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Said {
    limit: u32,
    remaining: u32,
    reset_at: u64,
    /// `None`: admitted.
    wait: Option<Duration>,
}

impl From<Decision> for Said {
    fn from(decision: Decision) -> Self {
        Self {
            limit: decision.limit(),
            remaining: decision.remaining(),
            reset_at: decision.reset_at().as_millis(),
            wait: decision.wait(),
        }
    }
}

/// The instant a decision was made at.
pub(crate) fn instant(decision: &Decision) -> Timestamp {
    let reset = Duration::from_millis(decision.reset_at().as_millis());
    let since_epoch = reset.saturating_sub(decision.reset_after());
    Timestamp::default().saturating_add(since_epoch)
}

/// Writes a line in one piece: one that is cut off by a kill is no line.
pub(crate) fn say(mut to: impl Write, what: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(what)?;
    line.push(b'\n');
    to.write_all(&line)?;
    to.flush()
}
