//! `Times`: the instants of a log, as runs of equal ones; a few runs in place.
//!
//! Most limits that guard something are small: up to [`SHORT`] runs need no memory elsewhere, so that a
//! check touches one place. A longer log is a ring, whose length a check does not feel. A client that
//! hammers hits the same millisecond again and again: that is one run.

use std::collections::VecDeque;
use std::iter::repeat_n;

/// How many runs are kept in place.
const SHORT: usize = 5;

/// Instants in ms since the Unix epoch.
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

/// Any number of runs.
#[derive(Clone, Debug)]
pub(super) struct Long {
    runs: VecDeque<Run>,
    /// How many instants were forgotten.
    gone: u64,
}

#[derive(Clone, Copy, Debug)]
struct Run {
    at: u64,
    /// How many instants there were up to its end, forgotten ones included.
    upto: u64,
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
    fn push(&mut self, time: u64, count: u32) {
        match self.runs.back_mut() {
            Some(last) if last.at == time => last.upto += u64::from(count),
            last => {
                let upto = last.map_or(self.gone, |last| last.upto);
                let upto = upto + u64::from(count);
                self.runs.push_back(Run { at: time, upto });
            }
        }
    }

    fn forget(&mut self, count: usize) {
        self.gone = self.gone.saturating_add(count as u64);
        while self.runs.front().is_some_and(|run| run.upto <= self.gone) {
            self.runs.pop_front();
        }
    }

    /// How many instants there are before a run.
    fn before(&self, run: usize) -> usize {
        let last = run.checked_sub(1).and_then(|last| self.runs.get(last));
        let upto = last.map_or(self.gone, |last| last.upto);
        usize::try_from(upto.saturating_sub(self.gone)).unwrap_or(usize::MAX)
    }
}

impl Times {
    #[inline]
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Short(short) => short.before(short.length()) as usize,
            Self::Long(long) => long.before(long.runs.len()),
        }
    }

    /// How many bytes it holds outside of itself.
    #[inline]
    pub(super) fn memory(&self) -> usize {
        match self {
            Self::Short(_) => 0,
            Self::Long(long) => long.runs.capacity() * size_of::<Run>(),
        }
    }

    /// Each instant, and how often it is there.
    fn runs(&self) -> impl Iterator<Item = (u64, usize)> + '_ {
        let count = match self {
            Self::Short(short) => short.length(),
            Self::Long(long) => long.runs.len(),
        };
        (0..count).map(|run| match self {
            Self::Short(short) => {
                let count = short.upto(run) - short.before(run);
                (short.at(run), count as usize)
            }
            Self::Long(long) => {
                let count = long.before(run + 1) - long.before(run);
                (long.runs.get(run).map_or(0, |run| run.at), count)
            }
        })
    }

    /// All of them.
    pub(super) fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        self.runs().flat_map(|(at, count)| repeat_n(at, count))
    }

    #[inline]
    pub(super) fn get(&self, position: usize) -> Option<u64> {
        match self {
            Self::Short(short) => {
                let ends_after = |run: &usize| short.upto(*run) as usize > position;
                let run = (0..short.length()).find(ends_after);
                run.map(|run| short.at(run))
            }
            Self::Long(long) if position == 0 => long.runs.front().map(|run| run.at),
            Self::Long(long) => {
                let position = long.gone.saturating_add(position as u64);
                let run = long.runs.partition_point(|run| run.upto <= position);
                long.runs.get(run).map(|run| run.at)
            }
        }
    }

    #[inline]
    pub(super) fn newest(&self) -> Option<u64> {
        match self {
            Self::Short(short) => short.length().checked_sub(1).map(|last| short.at(last)),
            Self::Long(long) => long.runs.back().map(|run| run.at),
        }
    }

    /// Where those begin for which `is_before` does not hold, which holds for the oldest ones.
    #[inline]
    pub(super) fn first_not(&self, is_before: impl Fn(u64) -> bool) -> usize {
        match self {
            Self::Short(short) => {
                let before = |run: &usize| is_before(short.at(*run));
                let runs = (0..short.length()).take_while(before).count();
                short.before(runs) as usize
            }
            // Mostly there are none to pass.
            Self::Long(long) if long.runs.front().is_none_or(|run| !is_before(run.at)) => 0,
            Self::Long(long) => long.before(long.runs.partition_point(|run| is_before(run.at))),
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
    #[inline]
    pub(super) fn forget(&mut self, count: usize) {
        if count == 0 {
            return;
        }
        match self {
            Self::Short(short) => short.forget(u32::try_from(count).unwrap_or(u32::MAX)),
            Self::Long(long) => {
                long.forget(count);
                if long.runs.is_empty() {
                    *self = Self::default();
                }
            }
        }
    }

    /// Adds `count` times the instant `time`, at least once.
    #[inline]
    pub(super) fn push(&mut self, time: u64, count: u32) {
        let has_room = match self {
            Self::Short(short) => short.push(time, count),
            Self::Long(long) => {
                long.push(time, count);
                true
            }
        };
        if !has_room {
            let mut long = self.lengthened();
            long.push(time, count);
            *self = Self::Long(long);
        }
    }

    /// The same as a ring.
    fn lengthened(&self) -> Long {
        let mut long = Long {
            runs: VecDeque::with_capacity(2 * SHORT),
            gone: 0,
        };
        for (at, count) in self.runs() {
            long.push(at, u32::try_from(count).unwrap_or(u32::MAX));
        }
        long
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
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            8 => (0..20_u64).prop_map(Act::Push),
            1 => (u64::from(u32::MAX) - 20..=u64::from(u32::MAX) + 20).prop_map(Act::Push),
            4 => Just(Act::Push(0)),
            2 => (0..16_usize).prop_map(Act::Forget),
            1 => (0..200_u64).prop_map(Act::BringBack),
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
