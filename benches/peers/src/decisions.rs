//! Checks of clients at random: what a decision costs.
//!
//! The peers take turns, and whoever's turn it is not is closed, or does nothing by itself: a flush
//! or a sweep of ours would slow down the others. Every client is known, to the file too, before
//! the clock starts. A turn has all its threads counted; a figure is the sum of a peer's turns.
//!
//! In memory the quota is 20 per 1 ms: so short that clients under this load keep to it. A million
//! clients have 20 per 3 s, as each comes some times a second only: of a shorter window ours would
//! forget many in between, and have them new. On disk, ours and SQLite's, it is 100 per 10 min, of
//! which nobody comes to the end.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ratevault::{Durability, Quota};
use tempfile::TempDir;

use crate::folder;
use crate::governed::Governed;
use crate::load::{Done, Limit, clients, hammer};
use crate::ours::{FLUSH_EVERY, Ours, RARELY, quota};
use crate::report::{Figure, Flushing, Load, Report};
use crate::sqlite::{SqliteLog, Synchronous};
use crate::turns::Effort;

const LIMIT: u32 = 20;

/// Of what is decided on disk: for as long as this takes, clients keep to it.
const LONG_LIMIT: u32 = 100;
const LONG_WINDOW: Duration = Duration::from_secs(600);

/// How full long lists are. Not quite, as checks may be quicker while they are measured.
const FULL: f64 = 0.8;

/// How many turns a figure is the sum of, so that all have theirs in the same rounds.
const TURNS: u32 = 5;

/// How many flushes a figure of ours has to see at least.
const FLUSHES: u32 = 10;

/// No figure takes so many rounds.
const MOST_ROUNDS: usize = 100;

/// Decisions in memory, by one and two threads.
pub(crate) fn in_memory(effort: Effort, report: &mut Report) -> io::Result<()> {
    let loads = [
        (1_000, 1, TURNS, FLUSHES),
        (100_000, 1, TURNS, FLUSHES),
        // One turn each: to get a million ready takes long.
        (1_000_000, 3_000, 1, 1),
    ];
    for (keys, window_ms, turns, flushes) in loads {
        let (folder, clients) = (folder(), clients(keys).collect::<Vec<_>>());
        let window = Duration::from_millis(window_ms);
        let governed = Governed::new(LIMIT, window);
        let ours = |name, file, flush_every, flushes| {
            Box::new(Buffered {
                name,
                path: folder.path().join(file),
                clients: &clients,
                quota: quota(LIMIT, window),
                flush_every,
                flushes,
                turns,
                open: None,
            })
        };
        let mut entrants: Vec<Box<dyn Entrant>> =
            vec![Box::new(Simple::in_memory("governor", &governed, &clients))];
        if !effort.is_quick() || turns > 1 {
            entrants.push(ours("ours buffered 1 h", "rarely.redb", RARELY, 0));
        }
        entrants.push(ours("ours buffered", "limits.redb", FLUSH_EVERY, flushes));
        compete(&mut entrants, keys, &[1, 2], turns, effort, report)?;
    }
    Ok(())
}

/// Decisions that are on disk before they are answered.
pub(crate) fn on_disk(effort: Effort, report: &mut Report) -> io::Result<()> {
    const KEYS: u32 = 100_000;
    let (folder, clients) = (folder(), clients(KEYS).collect::<Vec<_>>());
    let log = |name, synchronous| {
        let log = SqliteLog::create(
            &folder.path().join(name),
            synchronous,
            LONG_LIMIT,
            LONG_WINDOW,
        );
        log.check_all(&clients);
        log
    };
    let full = log("full.sqlite", Synchronous::Full);
    let normal = log("normal.sqlite", Synchronous::Normal);
    let committed = committed(&folder, &clients);
    let mut entrants: Vec<Box<dyn Entrant>> = vec![
        Box::new(Simple::on_disk("ours committed", &committed, &clients)),
        Box::new(Simple::on_disk("sqlite full", &full, &clients)),
        Box::new(Simple::on_disk("sqlite normal", &normal, &clients)),
    ];
    let threads: &[usize] = if effort.is_quick() { &[64] } else { &[1, 64] };
    compete(&mut entrants, KEYS, threads, TURNS, effort, report)
}

/// A committed table that knows the clients: they came while it was buffered, which is quicker.
fn committed(folder: &TempDir, clients: &[String]) -> Ours {
    let (path, quota) = (
        folder.path().join("limits.redb"),
        quota(LONG_LIMIT, LONG_WINDOW),
    );
    let buffered = Ours::buffered(&path, FLUSH_EVERY, quota);
    buffered.check_all(clients);
    buffered.close();
    Ours::open(&path, Durability::Committed, quota)
}

/// Lists of hits that are short, and lists that are long: 1,000 clients, one thread.
///
/// Both are flushed every 100 ms to a file. A limit of 10 is per 1 ms, the shortest window there is:
/// a client comes about ten times a ms, and its list grows from none to about ten within each. The
/// window of the limit of 10,000 is measured beforehand to be the time in which a client comes 8,000
/// times; so many hits are in each list when the clock starts, and with every check that records one
/// another leaves.
pub(crate) fn limits(effort: Effort, report: &mut Report) -> io::Result<()> {
    const KEYS: u32 = 1_000;
    // To fill long lists takes long.
    const ROUNDS: u32 = 2;
    let (folder, clients) = (folder(), clients(KEYS).collect::<Vec<_>>());
    let mut figures = Vec::new();
    for (bench, limit) in [("limit 10", 10), ("limit 10000", 10_000)] {
        let load = Load {
            bench,
            keys: KEYS,
            threads: 1,
        };
        let path = folder.path().join(bench);
        figures.push((load, path, limit, Tally::default()));
    }
    let least = effort.figure();
    let flushes = FLUSHES.div_ceil(ROUNDS);
    for _ in 0..MOST_ROUNDS {
        let mut all_done = true;
        for (_, path, limit, tally) in &mut figures {
            if !tally.is_enough(least, FLUSHES) {
                all_done = false;
                let ours = full_lists(path, *limit, &clients);
                tally.add(turn(&ours, 1, &clients, least / ROUNDS, flushes.into()));
                ours.close();
            }
        }
        if all_done {
            break;
        }
    }
    let figures = figures.into_iter();
    report.add(figures.map(|(load, .., tally)| tally.figure(load, "ours buffered")))
}

/// A limiter whose lists are about as long as they get.
fn full_lists(path: &Path, limit: u32, clients: &[String]) -> Ours {
    let mut ours = Ours::buffered(path, FLUSH_EVERY, quota(limit, Duration::from_secs(60)));
    // The second time it is known how quick checks are that prune.
    let mut fill = Duration::from_secs(1);
    for _ in 0..2 {
        let done = hammer(&ours, 1, clients, |elapsed| elapsed >= fill);
        let per_hit = done.seconds * clients.len() as f64 / done.checks as f64;
        let window = Duration::from_secs_f64(per_hit * f64::from(limit) * FULL);
        let window = Duration::from_millis(u64::try_from(window.as_millis()).unwrap_or(1).max(1));
        ours = ours.with(quota(limit, window));
        fill = window + window / 5;
    }
    ours
}

/// Somebody who takes turns.
trait Entrant {
    fn name(&self) -> &'static str;

    /// How many flushes its figure has to see.
    fn flushes(&self) -> u32;

    /// Gets ready: every client is known.
    fn enter(&mut self);

    fn turn(&self, threads: usize, least: Duration) -> Tally;

    /// Is quiet from here on.
    fn leave(&mut self);
}

/// What was measured of a peer.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    done: Done,
    flushing: Option<Flushing>,
}

impl Tally {
    fn add(&mut self, turn: Self) {
        self.done.add(turn.done);
        self.flushing = match (self.flushing, turn.flushing) {
            (Some(before), Some(now)) => Some(before.and(now)),
            (before, now) => before.or(now),
        };
    }

    fn is_enough(&self, least: Duration, flushes: u32) -> bool {
        let seen = self.flushing.map_or(0, |flushing| flushing.flushes);
        self.done.seconds >= least.as_secs_f64() && seen >= flushes.into()
    }

    fn figure(self, load: Load, peer: &'static str) -> Figure {
        assert!(self.done.checks > 0, "{peer} had no turn");
        let figure = Figure::new(load, peer).done(self.done);
        match self.flushing {
            Some(flushing) => figure.flushing(flushing).seconds(self.done.seconds),
            None => figure,
        }
    }
}

/// Has the entrants take turns until each has a figure for each number of threads.
fn compete(
    entrants: &mut [Box<dyn Entrant + '_>],
    keys: u32,
    threads: &[usize],
    turns: u32,
    effort: Effort,
    report: &mut Report,
) -> io::Result<()> {
    let least = effort.figure();
    let mut tallies = vec![vec![Tally::default(); threads.len()]; entrants.len()];
    for _ in 0..MOST_ROUNDS {
        let mut all_done = true;
        for (entrant, tallies) in entrants.iter_mut().zip(&mut tallies) {
            let flushes = entrant.flushes();
            let is_open = |tally: &Tally| !tally.is_enough(least, flushes);
            if !tallies.iter().any(is_open) {
                continue;
            }
            all_done = false;
            entrant.enter();
            for (tally, threads) in tallies.iter_mut().zip(threads) {
                if is_open(tally) {
                    tally.add(entrant.turn(*threads, least / turns));
                }
            }
            entrant.leave();
        }
        if all_done {
            break;
        }
    }
    for (number, threads) in threads.iter().enumerate() {
        let load = Load {
            bench: "decisions",
            keys,
            threads: *threads,
        };
        let of_number = |tallies: &Vec<Tally>| tallies.get(number).copied().unwrap_or_default();
        let figures = entrants.iter().zip(&tallies);
        report.add(
            figures.map(|(entrant, tallies)| of_number(tallies).figure(load, entrant.name())),
        )?;
    }
    Ok(())
}

/// A turn of ours, in which so many flushes are completed at least.
fn turn(ours: &Ours, threads: usize, clients: &[String], least: Duration, flushes: u64) -> Tally {
    let before = ours.flushing();
    let is_over = |elapsed| elapsed >= least && ours.flushes() - before.flushes >= flushes;
    let done = hammer(ours, threads, clients, is_over);
    Tally {
        done,
        flushing: Some(ours.flushing().since(before)),
    }
}

/// Who does nothing when it is not called.
struct Simple<'a, L> {
    name: &'static str,
    limit: &'a L,
    clients: &'a [String],
    is_in_memory: bool,
}

impl<'a, L> Simple<'a, L> {
    const fn in_memory(name: &'static str, limit: &'a L, clients: &'a [String]) -> Self {
        Self {
            name,
            limit,
            clients,
            is_in_memory: true,
        }
    }

    /// Of somebody who knows the clients already.
    const fn on_disk(name: &'static str, limit: &'a L, clients: &'a [String]) -> Self {
        Self {
            name,
            limit,
            clients,
            is_in_memory: false,
        }
    }
}

impl<L: Limit> Entrant for Simple<'_, L> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn flushes(&self) -> u32 {
        0
    }

    fn enter(&mut self) {
        if self.is_in_memory {
            let mut hand = self.limit.hand();
            for client in self.clients {
                self.limit.allows(&mut hand, client);
            }
        }
    }

    fn turn(&self, threads: usize, least: Duration) -> Tally {
        Tally {
            done: hammer(self.limit, threads, self.clients, |elapsed| {
                elapsed >= least
            }),
            flushing: None,
        }
    }

    fn leave(&mut self) {}
}

/// Ours, buffered. If it flushes, it is open only when it is its turn.
struct Buffered<'a> {
    name: &'static str,
    path: PathBuf,
    clients: &'a [String],
    quota: Quota,
    flush_every: Duration,
    flushes: u32,
    turns: u32,
    open: Option<Ours>,
}

impl Entrant for Buffered<'_> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn flushes(&self) -> u32 {
        self.flushes
    }

    fn enter(&mut self) {
        let open = || Ours::buffered(&self.path, self.flush_every, self.quota);
        let ours = self.open.get_or_insert_with(open);
        ours.check_all(self.clients);
        if self.flushes > 0 {
            ours.flush();
            // Some may have been swept while others were flushed.
            ours.check_all(self.clients);
        }
    }

    fn turn(&self, threads: usize, least: Duration) -> Tally {
        let ours = self.open.as_ref().expect("who enters before its turn");
        let flushes = self.flushes.div_ceil(self.turns);
        turn(ours, threads, self.clients, least, flushes.into())
    }

    fn leave(&mut self) {
        // Who never flushes has nothing on disk to sweep either.
        if self.flushes > 0
            && let Some(ours) = self.open.take()
        {
            ours.close();
        }
    }
}
