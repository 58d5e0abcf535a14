//! A few runs, in place.

use super::long::MOST;

/// How many runs are kept in place.
pub(super) const SHORT: usize = 5;

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
pub(in crate::limiter) struct Short {
    runs: Count,
    first: u64,
    /// How much later than the first each other run is, in ms.
    after: [u32; SHORT - 1],
    /// How many instants there are up to the end of each run.
    upto: [u32; SHORT],
}

impl Short {
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

    /// How many instants there are.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.before(self.runs()) as usize
    }

    /// How many runs there are.
    #[inline]
    pub(super) fn runs(&self) -> usize {
        self.runs.get()
    }

    /// The run at this place, and how many instants there are up to its end.
    pub(super) fn run(&self, place: usize) -> (u64, usize) {
        (self.at(place), self.upto(place) as usize)
    }

    #[inline(always)]
    pub(super) fn oldest(&self) -> Option<u64> {
        (self.runs() > 0).then_some(self.first)
    }

    #[inline(always)]
    pub(super) fn newest(&self) -> Option<u64> {
        self.runs().checked_sub(1).map(|last| self.at(last))
    }

    /// The instant at a position.
    pub(super) fn get(&self, position: usize) -> Option<u64> {
        let ends_after = |run: &usize| self.upto(*run) as usize > position;
        let run = (0..self.runs()).find(ends_after);
        run.map(|run| self.at(run))
    }

    /// How many instants come first for which `is_before` holds.
    pub(super) fn count_before(&self, is_before: impl Fn(u64) -> bool) -> usize {
        let before = |run: &usize| is_before(self.at(*run));
        let runs = (0..self.runs()).take_while(before).count();
        self.before(runs) as usize
    }

    /// As `push`, if the newest instant is this one too and there is room.
    #[inline(always)]
    pub(super) fn push_like_last(&mut self, time: u64, count: u32) -> bool {
        let Some(last) = self.runs().checked_sub(1) else {
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
    pub(super) fn push(&mut self, time: u64, count: u32) -> bool {
        let run = self.runs();
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
    pub(super) fn forget(&mut self, count: u32) {
        let gone = (0..self.runs()).take_while(|run| self.upto(*run) <= count);
        let gone = gone.count();
        if gone == self.runs() {
            self.runs = Count::Zero;
            return;
        }
        let first = self.at(gone);
        let earlier = u32::try_from(first - self.first).unwrap_or(u32::MAX);
        self.upto.copy_within(gone.., 0);
        self.after.copy_within(gone.min(SHORT - 1).., 0);
        self.first = first;
        self.runs = Count::of(self.runs() - gone);
        for upto in &mut self.upto {
            *upto = upto.saturating_sub(count);
        }
        for after in &mut self.after {
            *after = after.saturating_sub(earlier);
        }
    }
}
