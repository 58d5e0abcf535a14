//! What each client must be answered, and what the file must hold of it.
//!
//! The algorithms are taken from the library, which tests them by themselves; what is modelled is that
//! each client has one state, which nothing loses and nothing else changes.
//!
//! Two things are not to be known exactly. Once the clock has passed a row's end, the row may be gone
//! for good, even if the clock is set back. And of a killed process, the file may hold more than was
//! said: what had been decided and not said yet.

use std::time::Duration;

use ratevault::{Algorithm, HitLog, Timestamp, WindowCount};

use crate::event::{Answer, CLIENTS, Held, Said};

/// A state whose age can be told.
pub(crate) trait State: Clone + PartialEq {
    /// What was found, if it is of this kind.
    fn of(held: Held) -> Option<Self>;

    /// When it was last changed, as far as it says so itself.
    fn changed_at(&self) -> Timestamp;

    /// How many hits it has.
    fn hits(&self) -> usize;
}

impl State for HitLog {
    fn of(held: Held) -> Option<Self> {
        match held {
            Held::Log(log) => Some(log),
            Held::Count(_) => None,
        }
    }

    fn changed_at(&self) -> Timestamp {
        self.times().next_back().unwrap_or_default()
    }

    fn hits(&self) -> usize {
        self.times().len()
    }
}

impl State for WindowCount {
    fn of(held: Held) -> Option<Self> {
        match held {
            Held::Log(_) => None,
            Held::Count(count) => Some(count),
        }
    }

    fn changed_at(&self) -> Timestamp {
        self.start()
    }

    fn hits(&self) -> usize {
        usize::try_from(self.used()).unwrap_or(usize::MAX)
    }
}

/// What the clock has shown, from each time it was set to the next.
#[derive(Debug, Default)]
pub(crate) struct Periods {
    /// What it showed first.
    starts: Vec<u64>,
    /// The latest that it showed, of those that are over.
    peaks: Vec<u64>,
}

impl Periods {
    /// It is set to `now`, and has shown `peak` at most before.
    pub(crate) fn begin(&mut self, peak: u64, now: u64) {
        if !self.starts.is_empty() {
            self.peaks.push(peak);
        }
        self.starts.push(now);
    }

    const fn current(&self) -> usize {
        self.peaks.len()
    }
}

/// How what was found compares with what had to be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finding {
    Right,
    Lost,
    Wrong,
}

/// What a row was after a check.
#[derive(Clone, Debug, PartialEq)]
struct Version<S> {
    /// `None`: there was no row.
    state: Option<S>,
    expires_at: u64,
    /// In which period of the clock.
    period: usize,
    /// By which answer.
    answer: u64,
}

impl<S> Version<S> {
    const fn none(answer: u64) -> Self {
        Self {
            state: None,
            expires_at: u64::MAX,
            period: 0,
            answer,
        }
    }

    /// Whether the row may be gone at `now`. It may be dated back to a clock that was set back.
    fn may_be_gone(&self, periods: &Periods, ttl: u64, now: u64) -> bool {
        let later = periods.starts.iter().skip(self.period + 1);
        let end = later.fold(self.expires_at, |end, start| end.min(start + ttl));
        let since = periods.peaks.iter().skip(self.period);
        let peak = since.fold(now, |peak, shown| peak.max(*shown));
        self.state.is_none() || end <= peak
    }
}

/// One client.
#[derive(Debug)]
struct Known<S> {
    /// What it may be now: mostly one.
    now: Vec<Version<S>>,
    /// What the file may hold after a crash, oldest first.
    file: Vec<Version<S>>,
}

/// A table.
#[derive(Debug)]
pub(crate) struct Book<A: Algorithm> {
    algorithm: A,
    clients: Vec<Known<A::State>>,
    /// Whether an answer comes before the file has it.
    is_buffered: bool,
    answers: u64,
}

impl<A> Book<A>
where
    A: Algorithm,
    A::State: State,
{
    pub(crate) fn new(algorithm: A, is_buffered: bool) -> Self {
        let unknown = |_| Known {
            now: vec![Version::none(0)],
            file: vec![Version::none(0)],
        };
        Self {
            algorithm,
            clients: (0..CLIENTS).map(unknown).collect(),
            is_buffered,
            answers: 0,
        }
    }

    /// How many answers were heard.
    pub(crate) const fn answers(&self) -> u64 {
        self.answers
    }

    /// Whether an answer is the one that had to be given.
    pub(crate) fn hear(&mut self, answer: &Answer, periods: &Periods) -> bool {
        self.answers += 1;
        let ttl = millis(self.algorithm.ttl());
        let Some(known) = at(&mut self.clients, answer.client) else {
            return false;
        };
        let (mut right, mut others) = (Vec::new(), Vec::new());
        for version in &known.now {
            for start in starts(version, periods, ttl, answer.now) {
                let is_fresh = start.is_none();
                let mut state = start.unwrap_or_default();
                let now = Timestamp::from_millis(answer.now);
                let verdict = self.algorithm.decide(&mut state, now, 1);
                let is_right = Said::from(verdict.decision) == answer.said;
                let next = if is_right { &mut right } else { &mut others };
                let changed = Version {
                    state: Some(state),
                    expires_at: answer.now + ttl,
                    period: periods.current(),
                    answer: self.answers,
                };
                if verdict.write {
                    add(next, changed);
                } else if !is_fresh {
                    // In memory it may have dropped hits that no longer count.
                    let trimmed = Version {
                        state: changed.state,
                        ..version.clone()
                    };
                    add(next, version.clone());
                    add(next, trimmed);
                }
            }
        }
        let is_right = !right.is_empty();
        known.now = if is_right { right } else { others };
        if self.is_buffered {
            let changed = known.now.iter();
            let changed = changed.filter(|version| version.answer == self.answers);
            known.file.extend(changed.cloned());
        } else {
            known.file.clone_from(&known.now);
        }
        is_right
    }

    /// A flush has brought everything to the file that was heard up to `answer`.
    pub(crate) fn flushed(&mut self, answer: u64) {
        for known in &mut self.clients {
            let carried = known.file.iter().rfind(|version| version.answer <= answer);
            if let Some(carried) = carried.map(|version| version.answer) {
                known.file.retain(|version| version.answer >= carried);
            }
        }
    }

    /// What is there of a client, at `now`, after a check of it has failed.
    pub(crate) fn settle(
        &mut self,
        client: u32,
        held: Option<Held>,
        periods: &Periods,
        now: u64,
    ) -> Finding {
        let candidates = at(&mut self.clients, client).map(|known| known.now.clone());
        let candidates = candidates.unwrap_or_default();
        self.find(client, held.and_then(State::of), &candidates, periods, now)
    }

    /// What is in the file of a client, at `now`, after a crash.
    pub(crate) fn recover(
        &mut self,
        client: u32,
        held: Option<Held>,
        periods: &Periods,
        now: u64,
    ) -> Finding {
        let candidates = at(&mut self.clients, client).map(|known| known.file.clone());
        let candidates = candidates.unwrap_or_default();
        self.find(client, held.and_then(State::of), &candidates, periods, now)
    }

    fn find(
        &mut self,
        client: u32,
        found: Option<A::State>,
        candidates: &[Version<A::State>],
        periods: &Periods,
        now: u64,
    ) -> Finding {
        let ttl = millis(self.algorithm.ttl());
        let Some(known) = at(&mut self.clients, client) else {
            return Finding::Wrong;
        };
        let mut versions: Vec<_> = candidates
            .iter()
            .filter(|version| match &found {
                None => version.may_be_gone(periods, ttl, now),
                Some(_) => version.state == found,
            })
            .cloned()
            .collect();
        if let Some(found) = &found
            && versions.is_empty()
        {
            versions.extend(unsaid(&self.algorithm, &known.now, found, periods));
        }
        let finding = if versions.is_empty() {
            let least = candidates.first().and_then(|first| first.state.as_ref());
            let age =
                |state: Option<&A::State>| state.map(|state| (state.changed_at(), state.hits()));
            versions.push(Version {
                state: found.clone(),
                expires_at: now + ttl,
                period: periods.current(),
                answer: 0,
            });
            if age(found.as_ref()) < age(least) {
                Finding::Lost
            } else {
                Finding::Wrong
            }
        } else {
            Finding::Right
        };
        if found.is_none() {
            // A row that has ended may be seen again, if the clock is set back before it is swept.
            add(&mut versions, Version::none(0));
        }
        for version in &mut versions {
            version.answer = self.answers;
        }
        known.now = versions;
        if self.is_buffered {
            known.file.extend(known.now.iter().cloned());
        } else {
            known.file.clone_from(&known.now);
        }
        finding
    }

    /// Everything that is known is from the file.
    pub(crate) fn recovered(&mut self) {
        for known in &mut self.clients {
            known.file.clone_from(&known.now);
        }
    }
}

/// What a row that was decided and not said would be.
fn unsaid<A>(
    algorithm: &A,
    known: &[Version<A::State>],
    found: &A::State,
    periods: &Periods,
) -> Option<Version<A::State>>
where
    A: Algorithm,
    A::State: State,
{
    let ttl = millis(algorithm.ttl());
    let at = found.changed_at();
    let would_be = |state: Option<A::State>| {
        let mut state = state.unwrap_or_default();
        let verdict = algorithm.decide(&mut state, at, 1);
        verdict.write && state == *found
    };
    let mut starts = known
        .iter()
        .flat_map(|version| starts(version, periods, ttl, at.as_millis()));
    starts.any(would_be).then(|| Version {
        state: Some(found.clone()),
        expires_at: at.as_millis() + ttl,
        period: periods.current(),
        answer: 0,
    })
}

/// What a check at `now` may find of a row.
fn starts<S: Clone>(version: &Version<S>, periods: &Periods, ttl: u64, now: u64) -> Vec<Option<S>> {
    let mut starts = Vec::new();
    if version.state.is_some() && version.expires_at > now {
        starts.push(version.state.clone());
    }
    if version.may_be_gone(periods, ttl, now) {
        starts.push(None);
    }
    starts
}

fn add<S: PartialEq>(versions: &mut Vec<Version<S>>, version: Version<S>) {
    if !versions.contains(&version) {
        versions.push(version);
    }
}

fn at<T>(list: &mut [T], number: u32) -> Option<&mut T> {
    usize::try_from(number).ok().and_then(|at| list.get_mut(at))
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}
