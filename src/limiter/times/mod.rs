//! `Times`: the instants of a log, as runs of equal ones; a few runs in place.
//!
//! Most limits that guard something are small: up to five runs need no memory elsewhere, so that a
//! check touches one place. A longer log is a ring, whose length a check does not feel. A client that
//! hammers hits the same millisecond again and again: that is one run.

mod long;
mod short;

use std::iter::repeat_n;

use long::{Long, MOST};
use short::Short;

/// Instants in ms since the Unix epoch, the newest 131,071 of them.
///
/// Invariant: ascending, which is for the callers of `push` to keep; no two runs have one instant.
#[derive(Clone, Debug)]
pub(super) enum Times {
    Short(Short),
    Long(Long),
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

impl Times {
    #[inline]
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Short(short) => short.len(),
            Self::Long(long) => long.len(),
        }
    }

    /// How many bytes it holds outside of itself.
    #[inline]
    pub(super) fn memory(&self) -> usize {
        match self {
            Self::Short(_) => 0,
            Self::Long(long) => long.memory(),
        }
    }

    /// How many different instants there are.
    pub(super) fn different(&self) -> usize {
        match self {
            Self::Short(short) => short.runs(),
            Self::Long(long) => long.runs(),
        }
    }

    /// Each instant, and how often it is there.
    pub(super) fn runs(&self) -> impl Iterator<Item = (u64, usize)> + '_ {
        let mut before = 0;
        (0..self.different()).map(move |place| {
            let (at, upto) = match self {
                Self::Short(short) => short.run(place),
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
            Self::Short(short) => short.get(position),
            Self::Long(long) => long.get(position),
        }
    }

    #[inline(always)]
    pub(super) fn oldest(&self) -> Option<u64> {
        match self {
            Self::Short(short) => short.oldest(),
            Self::Long(long) => Some(long.oldest()),
        }
    }

    #[inline]
    pub(super) fn newest(&self) -> Option<u64> {
        match self {
            Self::Short(short) => short.newest(),
            Self::Long(long) => Some(long.newest()),
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
            Self::Short(short) => short.count_before(is_before),
            Self::Long(long) => long.count_before(is_before),
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
    use super::long::POSITIONS;
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
                            long.age(count);
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
