//! Any number of runs: a ring, of which both ends are in place.

use std::collections::VecDeque;

use super::short::SHORT;

/// Any number of runs, at least one.
///
/// The newest and the instant of the oldest are in place: mostly a check needs no other.
#[derive(Clone, Debug)]
pub(in crate::limiter) struct Long {
    /// All but the newest.
    older: Box<Older>,
    first_at: u64,
    last_at: u64,
    /// Where the oldest run ends, and the newest: positions, forgotten instants included, that start
    /// over at `POSITIONS`.
    first_upto: u32,
    last_upto: u32,
    /// How many instants were forgotten.
    gone: u32,
    /// How many runs `older` has room for.
    room: u32,
}

#[derive(Clone, Debug)]
struct Older {
    /// When the first run was.
    base: u64,
    runs: VecDeque<Run>,
}

/// How much later than the base a run is, in ms, and the position where it ends. Small, as how many
/// pages of memory the lists of all clients lie on is what a check in a long one costs.
#[derive(Clone, Copy, Debug)]
struct Run(u64);

const POSITION_BITS: u32 = 17;
pub(super) const POSITIONS: u32 = 1 << POSITION_BITS;

/// How many instants there are at most: fewer than positions. A log has up to 100,000.
pub(super) const MOST: u32 = POSITIONS - 1;

/// Instants are at most so far apart, over 4,000 years; others are brought closer.
const LATEST: u64 = u64::MAX >> POSITION_BITS;

impl Run {
    fn new(after: u64, upto: u32) -> Self {
        Self((after.min(LATEST) << POSITION_BITS) | u64::from(upto))
    }

    fn after(self) -> u64 {
        self.0 >> POSITION_BITS
    }

    #[expect(clippy::cast_possible_truncation, reason = "no other bits are left")]
    fn upto(self) -> u32 {
        (self.0 & u64::from(MOST)) as u32
    }
}

impl Older {
    fn at(&self, run: Run) -> u64 {
        self.base + run.after()
    }
}

impl Long {
    pub(super) fn new(time: u64, count: u32) -> Self {
        Self {
            older: Box::new(Older {
                base: time,
                runs: VecDeque::new(),
            }),
            first_at: time,
            last_at: time,
            first_upto: count,
            last_upto: count,
            gone: 0,
            room: 0,
        }
    }

    /// How many instants there are before a position, of those that are left.
    #[inline]
    fn upto(&self, position: u32) -> usize {
        self.before(position) as usize
    }

    #[inline]
    const fn before(&self, position: u32) -> u32 {
        position.wrapping_sub(self.gone) % POSITIONS
    }

    /// How many there are.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.upto(self.last_upto)
    }

    pub(super) fn push(&mut self, time: u64, count: u32) {
        if !self.push_like_last(time, count) {
            self.begin_run(time);
            self.last_upto = (self.last_upto + count) % POSITIONS;
        }
    }

    /// As `push`, if the newest instant is this one too and there is room.
    #[inline(always)]
    pub(super) fn push_like_last(&mut self, time: u64, count: u32) -> bool {
        if time != self.last_at || count > MOST - self.before(self.last_upto) {
            return false;
        }
        self.last_upto = (self.last_upto + count) % POSITIONS;
        if self.first_at == time {
            // It is the only run.
            self.first_upto = self.last_upto;
        }
        true
    }

    /// From here on the newest run is one at `time`.
    fn begin_run(&mut self, time: u64) {
        let Older { base, runs } = &mut *self.older;
        let run = Run::new(self.last_at.saturating_sub(*base), self.last_upto);
        self.last_at = time;
        // Of those that are brought closer there is one, as of any instant.
        if let Some(newest) = runs.back_mut()
            && newest.after() == run.after()
        {
            *newest = run;
            if runs.len() == 1 {
                self.first_upto = run.upto();
            }
            return;
        }
        if runs.len() == runs.capacity() {
            // By a quarter: doubling would leave half of it unused.
            runs.reserve_exact(runs.len() / 4 + 2 * SHORT);
            self.room = u32::try_from(runs.capacity()).unwrap_or(u32::MAX);
        }
        runs.push_back(run);
    }

    /// How many bytes it holds outside of itself.
    #[inline]
    pub(super) fn memory(&self) -> usize {
        size_of::<Older>() + self.room as usize * size_of::<Run>()
    }

    /// How many runs there are.
    pub(super) fn runs(&self) -> usize {
        self.older.runs.len() + 1
    }

    #[inline(always)]
    pub(super) const fn oldest(&self) -> u64 {
        self.first_at
    }

    #[inline(always)]
    pub(super) const fn newest(&self) -> u64 {
        self.last_at
    }

    /// The instant at a position, counted from the oldest that is left.
    pub(super) fn get(&self, position: usize) -> Option<u64> {
        if position >= self.len() {
            return None;
        }
        if position < self.upto(self.first_upto) {
            return Some(self.first_at);
        }
        let ends_before = |run| self.upto(Run::upto(run)) <= position;
        Some(self.run(self.older_before(ends_before)).0)
    }

    /// How many instants come first for which `is_before` holds.
    pub(super) fn count_before(&self, is_before: impl Fn(u64) -> bool) -> usize {
        if is_before(self.last_at) {
            return self.len();
        }
        let passed = self.older_before(|run| is_before(self.older.at(run)));
        passed.checked_sub(1).map_or(0, |last| self.run(last).1)
    }

    /// Drops the `count` oldest, of which there are more.
    #[inline]
    pub(super) fn forget(&mut self, count: u32) {
        let is_within_a_run = self.upto(self.first_upto) > count as usize;
        self.gone = (self.gone + count) % POSITIONS;
        if !is_within_a_run {
            self.forget_runs(count);
        }
    }

    /// Drops the runs that ended within the `count` instants that were dropped last.
    fn forget_runs(&mut self, count: u32) {
        let start = self.gone.wrapping_sub(count);
        let ended = |run: &Run| run.upto().wrapping_sub(start) % POSITIONS <= count;
        let older = &mut *self.older;
        while older.runs.front().is_some_and(ended) {
            older.runs.pop_front();
        }
        let first = older.runs.front().copied();
        self.first_at = first.map_or(self.last_at, |run| older.at(run));
        self.first_upto = first.map_or(self.last_upto, Run::upto);
    }

    /// How many of the older runs come first for which `is_before` holds. Mostly few do, which are
    /// then found without a look at many others.
    fn older_before(&self, is_before: impl Fn(Run) -> bool) -> usize {
        let runs = &self.older.runs;
        let holds = |place: usize| runs.get(place).is_some_and(|run| is_before(*run));
        let (mut low, mut step) = (0, 1);
        while holds(low + step - 1) {
            low += step;
            step *= 2;
        }
        // It holds for the first `low`, and not for the one `step` further on.
        let (mut high, mut middle);
        high = low + step - 1;
        while low < high {
            middle = low.midpoint(high);
            if holds(middle) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        low
    }

    /// The run at this place, and how many instants there are up to its end.
    pub(super) fn run(&self, place: usize) -> (u64, usize) {
        match self.older.runs.get(place) {
            Some(run) => (self.older.at(*run), self.upto(run.upto())),
            None => (self.last_at, self.len()),
        }
    }

    /// Has it so many more positions on.
    #[cfg(test)]
    pub(super) fn age(&mut self, count: u32) {
        let older = |position: u32| position.wrapping_add(count) % POSITIONS;
        for run in &mut self.older.runs {
            *run = Run::new(run.after(), older(run.upto()));
        }
        for end in [&mut self.gone, &mut self.first_upto, &mut self.last_upto] {
            *end = older(*end);
        }
    }
}
