//! `Times`: the instants of a log, as runs of equal ones; a few runs in place.
//!
//! Most limits that guard something are small: up to [`SHORT`] runs need no memory elsewhere, so that a
//! check touches one place. A longer log is a ring, whose length a check does not feel. A client that
//! hammers hits the same millisecond again and again: that is one run.

use std::collections::VecDeque;
use std::iter::repeat_n;

/// How many runs are kept in place.
const SHORT: usize = 5;

/// Instants in ms since the Unix epoch, the newest 131,071 of them.
///
/// Invariant: ascending, which is for the callers of `push` to keep; no two runs have one instant.
#[derive(Clone, Debug)]
pub(super) enum Times {
    Short(Short),
    Long(Long),
}

/// How many runs there are. An enumeration has values to spare, so that what it is part of needs no
/// tag: an entry in memory stays within two cache lines.
#[derive(Clone, Copy, Debug, Default)]
enum Count {
    #[default]
    Zero,
    One,
    Two,
    Three,
    Four,
    Five,
}

impl Count {
    #[inline]
    const fn get(self) -> usize {
        self as usize
    }

    /// At most `SHORT`.
    #[inline]
    const fn of(count: usize) -> Self {
        match count {
            0 => Self::Zero,
            1 => Self::One,
            2 => Self::Two,
            3 => Self::Three,
            4 => Self::Four,
            _ => Self::Five,
        }
    }
}

/// Few runs, within 49 days.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Short {
    runs: Count,
    first: u64,
    /// How much later than the first each other run is, in ms.
    after: [u32; SHORT - 1],
    /// How many instants there are up to the end of each run.
    upto: [u32; SHORT],
}

/// Any number of runs, at least one.
///
/// The newest and the instant of the oldest are in place: mostly a check needs no other.
#[derive(Clone, Debug)]
pub(super) struct Long {
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
const POSITIONS: u32 = 1 << POSITION_BITS;

/// How many instants there are at most: fewer than positions. A log has up to 100,000.
const MOST: u32 = POSITIONS - 1;

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

impl Default for Times {
    fn default() -> Self {
        Self::Short(Short::default())
    }
}

impl PartialEq for Times {
    fn eq(&self, other: &Self) -> bool {
        self.runs().eq(other.runs())
    }
}

impl Eq for Times {}

impl Short {
    #[inline]
    fn length(&self) -> usize {
        self.runs.get()
    }

    #[inline]
    fn at(&self, run: usize) -> u64 {
        match run.checked_sub(1).and_then(|run| self.after.get(run)) {
            None => self.first,
            Some(after) => self.first + u64::from(*after),
        }
    }

    #[inline]
    fn upto(&self, run: usize) -> u32 {
        self.upto.get(run).copied().unwrap_or_default()
    }

    /// How many instants there are before a run.
    #[inline]
    fn before(&self, run: usize) -> u32 {
        run.checked_sub(1).map_or(0, |run| self.upto(run))
    }

    /// As `push`, if the newest instant is this one too and there is room.
    #[inline(always)]
    fn push_like_last(&mut self, time: u64, count: u32) -> bool {
        let Some(last) = self.length().checked_sub(1) else {
            return false;
        };
        let is_like_last = self.at(last) == time;
        match self.upto.get_mut(last) {
            Some(upto) if is_like_last && count <= MOST - (*upto).min(MOST) => {
                *upto += count;
                true
            }
            _ => false,
        }
    }

    /// Says whether there was room.
    #[inline]
    fn push(&mut self, time: u64, count: u32) -> bool {
        let run = self.length();
        let upto = self.before(run).checked_add(count);
        let last = run.checked_sub(1);
        // Of the run that the instants belong to: its place, and how much later than the first it is.
        let (run, after) = match last {
            Some(last) if self.at(last) == time => (last, None),
            Some(last) => match u32::try_from(time.saturating_sub(self.first)) {
                Ok(after) => (last + 1, self.after.get_mut(last).zip(Some(after))),
                Err(_) => return false,
            },
            None => {
                self.first = time;
                (0, None)
            }
        };
        let (Some(place), Some(upto)) = (self.upto.get_mut(run), upto) else {
            return false;
        };
        *place = upto;
        if let Some((place, after)) = after {
            *place = after;
        }
        self.runs = Count::of(run + 1);
        true
    }

    #[inline]
    fn forget(&mut self, count: u32) {
        let gone = (0..self.length()).take_while(|run| self.upto(*run) <= count);
        let gone = gone.count();
        if gone == self.length() {
            self.runs = Count::Zero;
            return;
        }
        let first = self.at(gone);
        let earlier = u32::try_from(first - self.first).unwrap_or(u32::MAX);
        self.upto.copy_within(gone.., 0);
        self.after.copy_within(gone.min(SHORT - 1).., 0);
        self.first = first;
        self.runs = Count::of(self.length() - gone);
        for upto in &mut self.upto {
            *upto = upto.saturating_sub(count);
        }
        for after in &mut self.after {
            *after = after.saturating_sub(earlier);
        }
    }
}

impl Long {
    fn new(time: u64, count: u32) -> Self {
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
    fn len(&self) -> usize {
        self.upto(self.last_upto)
    }

    fn push(&mut self, time: u64, count: u32) {
        if !self.push_like_last(time, count) {
            self.begin_run(time);
            self.last_upto = (self.last_upto + count) % POSITIONS;
        }
    }

    /// As `push`, if the newest instant is this one too and there is room.
    #[inline(always)]
    fn push_like_last(&mut self, time: u64, count: u32) -> bool {
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
        let run = Run::new(self.last_at - *base, self.last_upto);
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

    /// Drops the `count` oldest, of which there are more.
    #[inline]
    fn forget(&mut self, count: u32) {
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
    fn run(&self, place: usize) -> (u64, usize) {
        match self.older.runs.get(place) {
            Some(run) => (self.older.at(*run), self.upto(run.upto())),
            None => (self.last_at, self.len()),
        }
    }
}

impl Times {
    #[inline]
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Short(short) => short.before(short.length()) as usize,
            Self::Long(long) => long.len(),
        }
    }

    /// How many bytes it holds outside of itself.
    #[inline]
    pub(super) fn memory(&self) -> usize {
        match self {
            Self::Short(_) => 0,
            Self::Long(long) => size_of::<Older>() + long.room as usize * size_of::<Run>(),
        }
    }

    /// How many different instants there are.
    pub(super) fn different(&self) -> usize {
        match self {
            Self::Short(short) => short.length(),
            Self::Long(long) => long.older.runs.len() + 1,
        }
    }

    /// Each instant, and how often it is there.
    pub(super) fn runs(&self) -> impl Iterator<Item = (u64, usize)> + '_ {
        let mut before = 0;
        (0..self.different()).map(move |place| {
            let (at, upto) = match self {
                Self::Short(short) => (short.at(place), short.upto(place) as usize),
                Self::Long(long) => long.run(place),
            };
            (at, upto - std::mem::replace(&mut before, upto))
        })
    }

    /// All of them.
    pub(super) fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        self.runs().flat_map(|(at, count)| repeat_n(at, count))
    }

    #[inline(always)]
    pub(super) fn get(&self, position: usize) -> Option<u64> {
        if position == 0 {
            self.oldest()
        } else {
            self.get_later(position)
        }
    }

    fn get_later(&self, position: usize) -> Option<u64> {
        match self {
            Self::Short(short) => {
                let ends_after = |run: &usize| short.upto(*run) as usize > position;
                let run = (0..short.length()).find(ends_after);
                run.map(|run| short.at(run))
            }
            Self::Long(long) if position < long.upto(long.first_upto) => Some(long.first_at),
            Self::Long(long) if position < long.len() => {
                let ends_before = |run| long.upto(Run::upto(run)) <= position;
                Some(long.run(long.older_before(ends_before)).0)
            }
            Self::Long(_) => None,
        }
    }

    #[inline(always)]
    pub(super) fn oldest(&self) -> Option<u64> {
        match self {
            Self::Short(short) => (short.length() > 0).then_some(short.first),
            Self::Long(long) => Some(long.first_at),
        }
    }

    #[inline]
    pub(super) fn newest(&self) -> Option<u64> {
        match self {
            Self::Short(short) => short.length().checked_sub(1).map(|last| short.at(last)),
            Self::Long(long) => Some(long.last_at),
        }
    }

    /// Where those begin for which `is_before` does not hold, which holds for the oldest ones.
    #[inline(always)]
    pub(super) fn first_not(&self, is_before: impl Fn(u64) -> bool) -> usize {
        match self.oldest() {
            Some(oldest) if is_before(oldest) => self.first_of_others_not(is_before),
            // Mostly there are none to pass.
            _ => 0,
        }
    }

    fn first_of_others_not(&self, is_before: impl Fn(u64) -> bool) -> usize {
        match self {
            Self::Short(short) => {
                let before = |run: &usize| is_before(short.at(*run));
                let runs = (0..short.length()).take_while(before).count();
                short.before(runs) as usize
            }
            Self::Long(long) if is_before(long.last_at) => long.len(),
            Self::Long(long) => {
                let passed = long.older_before(|run| is_before(long.older.at(run)));
                passed.checked_sub(1).map_or(0, |last| long.run(last).1)
            }
        }
    }

    /// Takes those later than `now` as `now`.
    pub(super) fn bring_back_to(&mut self, now: u64) {
        let mut brought_back = Self::default();
        for (at, count) in self.runs() {
            brought_back.push(at.min(now), u32::try_from(count).unwrap_or(u32::MAX));
        }
        *self = brought_back;
    }

    /// Drops the `count` oldest.
    #[inline(always)]
    pub(super) fn forget(&mut self, count: usize) {
        if count > 0 {
            self.forget_some(count);
        }
    }

    fn forget_some(&mut self, count: usize) {
        match self {
            Self::Short(short) => short.forget(u32::try_from(count).unwrap_or(u32::MAX)),
            Self::Long(long) if count >= long.len() => *self = Self::default(),
            Self::Long(long) => long.forget(u32::try_from(count).unwrap_or(u32::MAX)),
        }
    }

    /// Adds `count` times the instant `time`, at least once.
    #[inline(always)]
    pub(super) fn push(&mut self, time: u64, count: u32) {
        // Mostly it is like the one before.
        let is_done = match self {
            Self::Short(short) => short.push_like_last(time, count),
            Self::Long(long) => long.push_like_last(time, count),
        };
        if !is_done {
            self.push_other(time, count);
        }
    }

    fn push_other(&mut self, time: u64, count: u32) {
        let count = count.min(MOST);
        self.forget((self.len() + count as usize).saturating_sub(MOST as usize));
        let has_room = match self {
            Self::Short(short) => short.push(time, count),
            Self::Long(long) => {
                long.push(time, count);
                true
            }
        };
        if !has_room {
            self.lengthen(time, count);
        }
    }

    /// As `push`, and what was in place becomes a ring.
    #[inline(never)]
    fn lengthen(&mut self, time: u64, count: u32) {
        let mut runs = self
            .runs()
            .map(|(at, count)| (at, u32::try_from(count).unwrap_or(u32::MAX)))
            .chain([(time, count)]);
        if let Some((at, count)) = runs.next() {
            let mut long = Long::new(at, count);
            runs.for_each(|(at, count)| long.push(at, count));
            *self = Self::Long(long);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Act {
        Push(u64),
        Forget(usize),
        BringBack(u64),
        /// So many more instants were forgotten at some time.
        Age(u32),
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            8 => (0..20_u64).prop_map(Act::Push),
            1 => (u64::from(u32::MAX) - 20..=u64::from(u32::MAX) + 20).prop_map(Act::Push),
            4 => Just(Act::Push(0)),
            2 => (0..16_usize).prop_map(Act::Forget),
            1 => (0..200_u64).prop_map(Act::BringBack),
            1 => prop_oneof![Just(POSITIONS - 3), 0..POSITIONS].prop_map(Act::Age),
        ]
    }

    #[test]
    fn it_leaves_room_for_the_rest_of_an_entry() {
        assert_eq!(size_of::<Option<Times>>(), 48);
    }

    proptest! {
        #[test]
        fn it_is_a_list_whatever_its_length(acts in prop::collection::vec(act(), 0..80)) {
            let (mut times, mut model) = (Times::default(), Vec::<u64>::new());
            for act in acts {
                match act {
                    Act::Push(step) => {
                        let time = model.last().copied().unwrap_or(0) + step;
                        let count = 1 + (time % 3) as u32;
                        times.push(time, count);
                        model.extend(repeat_n(time, count as usize));
                    }
                    Act::Forget(count) => {
                        times.forget(count);
                        model.drain(..count.min(model.len()));
                    }
                    Act::Age(count) => {
                        if let Times::Long(long) = &mut times {
                            let older = |position: u32| position.wrapping_add(count) % POSITIONS;
                            for run in &mut long.older.runs {
                                *run = Run::new(run.after(), older(run.upto()));
                            }
                            for end in [&mut long.gone, &mut long.first_upto, &mut long.last_upto] {
                                *end = older(*end);
                            }
                        }
                    }
                    Act::BringBack(now) => {
                        times.bring_back_to(now);
                        model.iter_mut().for_each(|time| *time = now.min(*time));
                    }
                }
                prop_assert!(times.iter().eq(model.iter().copied()));
                prop_assert_eq!((times.len(), times.newest()), (model.len(), model.last().copied()));
                for (position, time) in model.iter().enumerate() {
                    prop_assert_eq!(times.get(position), Some(*time));
                }
                prop_assert_eq!(times.get(model.len()), None);
                for bound in [0, 5, 50, 500, u64::from(u32::MAX)] {
                    let expected = model.partition_point(|&time| time < bound);
                    prop_assert_eq!(times.first_not(|time| time < bound), expected);
                }
                let mut short = Times::default();
                model.iter().for_each(|&time| short.push(time, 1));
                prop_assert_eq!(&times, &short);
            }
        }
    }
}
