//! What the children say, compared with the model.

use std::collections::{BTreeMap, HashSet};
use std::io::BufRead;

use ratevault::{Clock, FixedWindow, SlidingWindow, SystemClock};

use super::{Run, lock, next};
use crate::event::{self, Answer, CLIENTS, Event, Held, THREADS, Table};
use crate::model::{Book, Finding, Periods};
use crate::{Failure, Kind};

/// By how many ms the system clocks of two processes may differ, which each reads once.
const CLOCKS_APART: u64 = 1_000;

/// The one client whom all threads check at once: how many places it has used.
#[derive(Debug, Default)]
struct Hot {
    /// The answers since the child began. Each is another number.
    answered: HashSet<u32>,
    /// The largest answer so far.
    most: u32,
    /// The file has to have so many.
    in_file: u32,
    /// What the flush under way brings there.
    begun: u32,
    /// How many checks have failed and may have been counted.
    failed: u32,
}

/// Hears one child after the other.
#[derive(Debug)]
pub(super) struct Listener<'r> {
    run: &'r Run,
    /// How far the child's clock is ahead, in ms.
    offset: i64,
    /// How often this child's clock was set.
    steps: usize,
    /// The latest instant that the last child's clock can have shown.
    peak: u64,
    periods: Periods,
    counted: Book<SlidingWindow>,
    ignored: Book<SlidingWindow>,
    fixed: Book<FixedWindow>,
    hot: Hot,
    is_open: bool,
    /// The rows that a child found before it began.
    found: BTreeMap<(usize, u32), Held>,
    hot_found: u32,
    /// What was answered when the flush under way began.
    begun: [u64; 3],
}

impl<'r> Listener<'r> {
    pub(super) fn new(run: &'r Run) -> Result<Self, Failure> {
        let is_buffered = run.kind == Kind::Buffered;
        Ok(Self {
            run,
            offset: 0,
            steps: 0,
            peak: 0,
            periods: Periods::default(),
            counted: Book::new(event::counted()?, is_buffered),
            ignored: Book::new(event::ignored()?, is_buffered),
            fixed: Book::new(event::fixed()?, is_buffered),
            hot: Hot::default(),
            is_open: false,
            found: BTreeMap::new(),
            hot_found: 0,
            begun: [0; 3],
        })
    }

    /// A child was killed that was told to set its clock like this. The last time may have been heard
    /// of or not.
    pub(super) fn killed(&mut self, offsets: &[i64]) {
        let unsaid = offsets.get(self.steps).copied();
        let ahead = unsaid.map_or(self.offset, |unsaid| unsaid.max(self.offset));
        let now = SystemClock.now().as_millis() + CLOCKS_APART;
        self.peak = now.saturating_add_signed(ahead);
    }

    /// Hears a child out, whose clock begins so far ahead.
    pub(super) fn hear(&mut self, mut lines: impl BufRead, offset: i64) -> Result<(), Failure> {
        (self.offset, self.steps) = (offset, 0);
        let now = SystemClock.now().as_millis() - CLOCKS_APART;
        self.periods
            .begin(self.peak, now.saturating_add_signed(offset));
        self.is_open = false;
        self.found.clear();
        self.hot_found = 0;
        while let Some(event) = next(&mut lines)? {
            self.take(event);
        }
        Ok(())
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Found {
                table,
                client,
                held,
                now,
            } => {
                if self.is_open {
                    let finding = self.settle(table, client, held, now);
                    self.judge(finding, table, client);
                } else if let Some(held) = held {
                    self.found.insert((table as usize, client), held);
                }
            }
            Event::HotFound(used) => self.hot_found = used,
            Event::Opened { now } => self.opened(now),
            Event::Answered(answer) => self.answered(&answer),
            Event::HotAnswered(used) => {
                self.count(1);
                if !self.hot.answered.insert(used) {
                    self.run.wrong(&format!("two checks were answered {used}"));
                }
                self.hot.most = self.hot.most.max(used);
                if self.run.kind == Kind::Committed {
                    self.hot.in_file = self.hot.most;
                }
            }
            Event::Newcomers(number) => self.count(number),
            Event::Failed => {
                self.hot.failed += 1;
                self.run.failed();
            }
            Event::NotFlushed => {
                self.run.obeyed();
                if self.run.kind == Kind::Buffered {
                    self.run.failed();
                }
            }
            Event::Begin => {
                self.begun = [
                    self.counted.answers(),
                    self.ignored.answers(),
                    self.fixed.answers(),
                ];
                self.hot.begun = self.hot.most;
            }
            Event::End => {
                self.run.obeyed();
                let [counted, ignored, fixed] = self.begun;
                self.counted.flushed(counted);
                self.ignored.flushed(ignored);
                self.fixed.flushed(fixed);
                self.hot.in_file = self.hot.in_file.max(self.hot.begun);
            }
            Event::Stepped { peak, now, offset } => {
                self.run.obeyed();
                self.offset = offset;
                self.steps += 1;
                self.periods.begin(peak, now);
                lock(&self.run.tally).steps += 1;
            }
            Event::Reopened => {
                self.run.obeyed();
                // It was closed, and nobody checked meanwhile.
                self.counted.flushed(u64::MAX);
                self.ignored.flushed(u64::MAX);
                self.fixed.flushed(u64::MAX);
                self.hot.in_file = self.hot.most;
                lock(&self.run.tally).restarts += 1;
            }
            Event::Wrong(what) => self.run.wrong(&what),
        }
    }

    fn count(&self, checks: u64) {
        lock(&self.run.tally).checks += checks;
    }

    /// A child has said what it found.
    fn opened(&mut self, now: u64) {
        self.is_open = true;
        for table in Table::ALL {
            for client in 0..CLIENTS {
                let held = self.found.remove(&(table as usize, client));
                let finding = match table {
                    Table::Counted => self.counted.recover(client, held, &self.periods, now),
                    Table::Ignored => self.ignored.recover(client, held, &self.periods, now),
                    Table::Fixed => self.fixed.recover(client, held, &self.periods, now),
                };
                self.judge(finding, table, client);
            }
        }
        self.counted.recovered();
        self.ignored.recovered();
        self.fixed.recovered();
        let found = self.hot_found;
        let (least, most) = (self.hot.in_file, self.hot.most + THREADS + self.hot.failed);
        if found < least {
            self.run.lost(&format!("hot: {found} of {least}"));
        } else if found > most {
            self.run.wrong(&format!("hot: {found}, above {most}"));
        }
        self.hot = Hot {
            answered: HashSet::new(),
            most: found,
            in_file: found,
            begun: found,
            failed: 0,
        };
    }

    fn answered(&mut self, answer: &Answer) {
        self.count(1);
        let periods = &self.periods;
        let is_right = match answer.table {
            Table::Counted => self.counted.hear(answer, periods),
            Table::Ignored => self.ignored.hear(answer, periods),
            Table::Fixed => self.fixed.hear(answer, periods),
        };
        if !is_right {
            self.run.wrong(&format!("{answer:?}"));
        }
    }

    fn settle(&mut self, table: Table, client: u32, held: Option<Held>, now: u64) -> Finding {
        let periods = &self.periods;
        match table {
            Table::Counted => self.counted.settle(client, held, periods, now),
            Table::Ignored => self.ignored.settle(client, held, periods, now),
            Table::Fixed => self.fixed.settle(client, held, periods, now),
        }
    }

    fn judge(&self, finding: Finding, table: Table, client: u32) {
        match finding {
            Finding::Right => {}
            Finding::Lost => self.run.lost(&format!("{client} of {table:?}")),
            Finding::Wrong => self
                .run
                .wrong(&format!("{client} of {table:?} after a crash")),
        }
    }
}
