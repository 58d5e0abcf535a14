//! One shard of the overlay: rows in memory, found by key. Knows no lock, no disk and no clock.
//!
//! The index is a table of positions: entries are large, and an index of them would be half empty.

use hashbrown::HashTable;

use super::super::key::Key;
use super::super::row::Row;
use super::pace::Reading;

/// How many entries are looked at to find one that may go.
const LOOKS: usize = 64;

/// How many entries a shard has if it has many.
const MANY: usize = 4_096;

/// What an entry costs beside itself: its place in the index, and room to grow.
const OVERHEAD: usize = 12;

#[derive(Debug)]
pub(super) struct Shard<V> {
    index: HashTable<u32>,
    entries: Vec<Entry<V>>,
    vacant: Vec<u32>,
    /// Where entries are dirty or in flight. A position that is clean again, or stands twice, is
    /// dropped when the list is read.
    dirty: Vec<u32>,
    /// Where the search for an entry that may go continues.
    hand: usize,
    /// What keys and values hold outside of their entries, in bytes.
    elsewhere: usize,
    last_ticket: u32,
    pub(super) reading: Reading,
}

/// A row in memory. As large as two cache lines that are fetched together, if the value is small.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Entry<V> {
    hash: u64,
    key: Key,
    /// `None`: there is no row.
    pub(super) value: Option<V>,
    pub(super) expires_at: u64,
    pub(super) ttl: u64,
    state: State,
    /// Whether it was used since the hand passed.
    pub(super) recent: bool,
}

/// Where the newest value of an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Vacant,
    /// Still in the file: whoever holds the ticket is reading it.
    Loading(u32),
    /// Here and in the file.
    Clean,
    /// Here.
    Dirty,
    /// Here, and in the transaction of this number: clean, once that is committed.
    InFlight(u32),
}

impl<V> Entry<V> {
    pub(super) const fn is_loading(&self) -> bool {
        matches!(self.state, State::Loading(_))
    }

    pub(super) const fn hash(&self) -> u64 {
        self.hash
    }

    /// Whether the newest value is only here, while `transaction` is the first not committed.
    fn is_pinned(&self, transaction: u32) -> bool {
        match self.state {
            State::Dirty => true,
            State::InFlight(number) => number == transaction,
            State::Vacant | State::Loading(_) | State::Clean => false,
        }
    }

    fn is_clean(&self, transaction: u32) -> bool {
        matches!(self.state, State::Clean | State::InFlight(_)) && !self.is_pinned(transaction)
    }
}

impl<V> Default for Shard<V> {
    fn default() -> Self {
        Self {
            index: HashTable::new(),
            entries: Vec::new(),
            vacant: Vec::new(),
            dirty: Vec::new(),
            hand: 0,
            elsewhere: 0,
            last_ticket: 0,
            reading: Reading::default(),
        }
    }
}

impl<V: Row> Shard<V> {
    /// Where the entry of `key` is.
    pub(super) fn find(&self, hash: u64, key: &Key) -> Option<u32> {
        self.find_by(hash, |other| other == key)
    }

    /// Where the entry with this hash is whose key is the one.
    #[inline]
    pub(super) fn find_by(&self, hash: u64, is_the_one: impl Fn(&Key) -> bool) -> Option<u32> {
        let is_it = |position: &u32| {
            let entry = self.get(*position);
            entry.is_some_and(|entry| entry.hash == hash && is_the_one(&entry.key))
        };
        self.index.find(hash, is_it).copied()
    }

    pub(super) fn get(&self, position: u32) -> Option<&Entry<V>> {
        self.entries.get(position as usize)
    }

    pub(super) fn get_mut(&mut self, position: u32) -> Option<&mut Entry<V>> {
        self.entries.get_mut(position as usize)
    }

    /// How many bytes it holds.
    pub(super) fn bytes(&self) -> usize {
        let live = self.entries.len() - self.vacant.len();
        live * (size_of::<Entry<V>>() + OVERHEAD) + self.elsewhere
    }

    /// Takes note that a value grew or shrank.
    pub(super) fn resized(&mut self, before: usize, after: usize) {
        self.elsewhere = (self.elsewhere + after).saturating_sub(before);
    }

    /// Leaves a mark in the place of a key that has no entry: its row is being read.
    pub(super) fn begin_loading(&mut self, hash: u64, key: &Key) -> u32 {
        self.last_ticket = self.last_ticket.wrapping_add(1);
        let ticket = self.last_ticket;
        self.elsewhere += key.elsewhere();
        self.add(Entry {
            hash,
            key: key.clone(),
            value: None,
            expires_at: 0,
            ttl: 0,
            state: State::Loading(ticket),
            recent: true,
        });
        ticket
    }

    fn add(&mut self, entry: Entry<V>) {
        let hash = entry.hash;
        let position = match self.vacant.pop() {
            Some(position) => {
                if let Some(place) = self.get_mut(position) {
                    *place = entry;
                }
                position
            }
            None => {
                if self.entries.len() == self.entries.capacity() {
                    let count = self.entries.len();
                    // Many by a quarter: doubling would leave half of it unused.
                    let more = if count < MANY {
                        count.max(4)
                    } else {
                        count / 4
                    };
                    self.entries.reserve_exact(more);
                }
                self.entries.push(entry);
                u32::try_from(self.entries.len() - 1).unwrap_or(u32::MAX)
            }
        };
        let entries = &self.entries;
        let hash_of = |position: &u32| entries.get(*position as usize).map_or(0, |e| e.hash);
        self.index.insert_unique(hash, position, hash_of);
    }

    /// Ends a load: the entry, if the mark with this ticket is still there.
    pub(super) fn loaded(&mut self, hash: u64, key: &Key, ticket: u32) -> Option<&mut Entry<V>> {
        let position = self.find(hash, key)?;
        let entry = self.get_mut(position)?;
        if entry.state != State::Loading(ticket) {
            return None;
        }
        entry.state = State::Clean;
        Some(entry)
    }

    /// Takes a mark back, if it is still there.
    pub(super) fn abandon(&mut self, hash: u64, key: &Key, ticket: u32) {
        if let Some(position) = self.find(hash, key)
            && self.get(position).map(|entry| entry.state) == Some(State::Loading(ticket))
        {
            self.vacate(position);
        }
    }

    /// Takes note that the value at `position` is newer than the file's. Says whether that is new.
    #[inline]
    pub(super) fn mark_dirty(&mut self, position: u32) -> bool {
        let Some(entry) = self.get_mut(position) else {
            return false;
        };
        match std::mem::replace(&mut entry.state, State::Dirty) {
            State::Dirty => return false,
            // It is in the list still.
            State::InFlight(_) => {}
            State::Vacant | State::Loading(_) | State::Clean => self.dirty.push(position),
        }
        true
    }

    pub(super) fn touch(&mut self, position: u32) {
        if let Some(entry) = self.get_mut(position)
            && !entry.recent
        {
            entry.recent = true;
        }
    }

    /// The list of dirty entries, to be gone through and put back by `keep_dirty`.
    pub(super) fn take_dirty(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.dirty)
    }

    /// Puts back those whose newest value is only here still, and adds them to `kept`. One in flight is
    /// among them: its transaction may fail.
    pub(super) fn keep_dirty(&mut self, positions: &[u32], transaction: u32, kept: &mut Vec<u32>) {
        for position in positions {
            let Some(entry) = self.entries.get_mut(*position as usize) else {
                continue;
            };
            if entry.is_pinned(transaction) {
                kept.push(*position);
                self.dirty.push(*position);
            } else if entry.is_clean(transaction) {
                entry.state = State::Clean;
            }
        }
    }

    /// The key of the entry at `position`, if its newest value is only here.
    pub(super) fn dirty_key(&self, position: u32, transaction: u32) -> Option<&Key> {
        let entry = self.get(position)?;
        entry.is_pinned(transaction).then_some(&entry.key)
    }

    /// The entry at `position` if it is that of `key` and dirty: from here on it is in flight.
    pub(super) fn stage(
        &mut self,
        position: u32,
        key: &Key,
        transaction: u32,
    ) -> Option<&Entry<V>> {
        let entry = self.get_mut(position)?;
        if entry.state != State::Dirty || entry.key != *key {
            return None;
        }
        entry.state = State::InFlight(transaction);
        Some(entry)
    }

    /// The transaction that the entry at `position` may be in has failed, if it is that of `key`.
    pub(super) fn unstage(&mut self, position: u32, key: &Key) {
        if let Some(entry) = self.get_mut(position)
            && matches!(entry.state, State::InFlight(_))
            && entry.key == *key
        {
            entry.state = State::Dirty;
        }
    }

    /// Whether the newest value of `key` is only here.
    pub(super) fn is_pinned(&self, hash: u64, key: &Key, transaction: u32) -> bool {
        let entry = self.find(hash, key).and_then(|position| self.get(position));
        entry.is_some_and(|entry| entry.is_pinned(transaction))
    }

    /// A transaction has removed the row of `key` from the file: unless a newer one is here, there is
    /// none. Which is worth knowing: who comes back is spared a look into the file.
    pub(super) fn gone(&mut self, hash: u64, key: &Key, transaction: u32) {
        let Some(position) = self.find(hash, key) else {
            return;
        };
        let Some(entry) = self.get_mut(position) else {
            return;
        };
        if entry.is_clean(transaction) {
            let held = entry.value.take().as_ref().map_or(0, Row::memory);
            entry.state = State::Clean;
            self.resized(held, 0);
        } else if matches!(entry.state, State::Loading(_) | State::InFlight(_)) {
            // What is being read is not there any more; and what the transaction itself has carried
            // may have come before the removal, or after it.
            self.vacate(position);
        }
    }

    /// Keeps nothing of `key`, unless its newest value is only here.
    pub(super) fn forget(&mut self, hash: u64, key: &Key, transaction: u32) {
        if let Some(position) = self.find(hash, key)
            && let Some(entry) = self.get(position)
            && (entry.is_clean(transaction) || entry.is_loading())
        {
            self.vacate(position);
        }
    }

    /// Lets clean entries go until `bytes` are held at most, those first that were not used lately.
    /// Says whether it came to that.
    pub(super) fn shrink_to(&mut self, bytes: usize, transaction: u32) -> bool {
        // Where the first was that may go, though it was used.
        let (mut looks, mut used) = (0, None);
        while self.bytes() > bytes {
            if looks == LOOKS || self.entries.is_empty() {
                let Some(position) = used.take() else {
                    return false;
                };
                self.vacate(position);
                looks = 0;
                continue;
            }
            looks += 1;
            self.hand = (self.hand + 1) % self.entries.len();
            if let Some(entry) = self.entries.get_mut(self.hand)
                && entry.is_clean(transaction)
                && let Ok(position) = u32::try_from(self.hand)
            {
                if std::mem::take(&mut entry.recent) {
                    used = used.or(Some(position));
                } else {
                    self.vacate(position);
                    (looks, used) = (0, None);
                }
            }
        }
        true
    }

    fn vacate(&mut self, position: u32) {
        let Some(entry) = self.entries.get_mut(position as usize) else {
            return;
        };
        let held = entry.key.elsewhere() + entry.value.as_ref().map_or(0, Row::memory);
        let hash = entry.hash;
        entry.state = State::Vacant;
        entry.key = Key::none();
        entry.value = None;
        // Not `entry`, which makes room for one more first, and so may ask for every hash.
        if let Ok(place) = self.index.find_entry(hash, |p| *p == position) {
            place.remove();
        }
        self.vacant.push(position);
        self.elsewhere = self.elsewhere.saturating_sub(held);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use serde::{Deserialize, Serialize};

    use super::*;

    #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
    struct Text(String);

    impl Row for Text {
        const KIND: &'static str = "text/1";

        fn memory(&self) -> usize {
            self.0.len()
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        BeginLoading(u8),
        /// The load with this ticket, or one like it, ends: with a row of so many bytes.
        EndLoading(u8, u32, Option<usize>),
        Abandon(u8, u32),
        /// A closure leaves a row of so many bytes.
        Put(u8, Option<usize>),
        StageAll,
        SettleAll(bool),
        Gone(u8),
        Forget(u8),
        ShrinkTo(usize),
    }

    /// What is known of an entry.
    #[derive(Clone, Debug, Default, PartialEq)]
    struct Known {
        value: Option<Text>,
        loading: Option<u32>,
        is_dirty: bool,
        is_in_flight: bool,
    }

    impl Known {
        fn is_clean(&self) -> bool {
            self.loading.is_none() && !self.is_dirty && !self.is_in_flight
        }
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let (key, bytes) = (0_u8..24, prop::option::of(0_usize..200));
        let step = prop_oneof![
            4 => key.clone().prop_map(Step::BeginLoading),
            4 => (key.clone(), 0_u32..3, bytes.clone())
                .prop_map(|(key, back, bytes)| Step::EndLoading(key, back, bytes)),
            1 => (key.clone(), 0_u32..3).prop_map(|(key, back)| Step::Abandon(key, back)),
            6 => (key.clone(), bytes).prop_map(|(key, bytes)| Step::Put(key, bytes)),
            1 => Just(Step::StageAll),
            1 => any::<bool>().prop_map(Step::SettleAll),
            1 => key.clone().prop_map(Step::Gone),
            1 => key.prop_map(Step::Forget),
            1 => (0_usize..8_000).prop_map(Step::ShrinkTo),
        ];
        prop::collection::vec(step, 1..120)
    }

    /// Long keys and short ones.
    fn key(number: u8) -> Key {
        let name = "k".repeat(usize::from(number) * 3);
        Key::new("e", name.as_str()).expect("a key")
    }

    /// Some are the same.
    fn hash(number: u8) -> u64 {
        u64::from(number / 2).wrapping_mul(0x9E37_79B9_7F4A_7C15)
    }

    fn text(bytes: usize) -> Text {
        Text("x".repeat(bytes))
    }

    #[derive(Default)]
    struct Pair {
        shard: Shard<Text>,
        transaction: u32,
        model: BTreeMap<u8, Known>,
    }

    impl Pair {
        fn take(&mut self, step: &Step) {
            let (shard, model) = (&mut self.shard, &mut self.model);
            match *step {
                Step::BeginLoading(number) if !model.contains_key(&number) => {
                    let loading = Some(shard.begin_loading(hash(number), &key(number)));
                    let known = Known {
                        loading,
                        ..Known::default()
                    };
                    model.insert(number, known);
                }
                Step::BeginLoading(_) => {}
                Step::EndLoading(number, back, bytes) => {
                    let known = model.get_mut(&number).filter(|known| {
                        let ticket = known.loading.map(|ticket| ticket.wrapping_sub(back));
                        known.loading.is_some() && ticket == known.loading
                    });
                    let ticket = ticket_of(shard, number).wrapping_sub(back);
                    let entry = shard.loaded(hash(number), &key(number), ticket);
                    assert_eq!(entry.is_some(), known.is_some());
                    if let (Some(entry), Some(known)) = (entry, known) {
                        entry.value = bytes.map(text);
                        known.value = bytes.map(text);
                        known.loading = None;
                        shard.resized(0, bytes.unwrap_or(0));
                    }
                }
                Step::Abandon(number, back) => {
                    let ticket = ticket_of(shard, number).wrapping_sub(back);
                    shard.abandon(hash(number), &key(number), ticket);
                    if back == 0 && model.get(&number).is_some_and(|k| k.loading.is_some()) {
                        model.remove(&number);
                    }
                }
                Step::Put(number, bytes) => {
                    let Some(known) = model.get_mut(&number).filter(|k| k.loading.is_none()) else {
                        return;
                    };
                    let position = shard.find(hash(number), &key(number)).expect("there");
                    let entry = shard.get_mut(position).expect("there");
                    entry.value = bytes.map(text);
                    let before = known.value.as_ref().map_or(0, Row::memory);
                    shard.resized(before, bytes.unwrap_or(0));
                    assert_eq!(shard.mark_dirty(position), !known.is_dirty);
                    known.value = bytes.map(text);
                    (known.is_dirty, known.is_in_flight) = (true, false);
                }
                Step::StageAll => {
                    for (number, known) in model {
                        let position = position_of(shard, *number);
                        let staged = shard.stage(position, &key(*number), self.transaction);
                        assert_eq!(staged.is_some(), known.is_dirty);
                        if let Some(entry) = staged {
                            assert_eq!(entry.value, known.value);
                            (known.is_dirty, known.is_in_flight) = (false, true);
                        }
                    }
                }
                Step::SettleAll(committed) => {
                    self.transaction += u32::from(committed);
                    for (number, known) in model {
                        if !committed {
                            shard.unstage(position_of(shard, *number), &key(*number));
                        }
                        known.is_dirty |= known.is_in_flight && !committed;
                        known.is_in_flight = false;
                    }
                }
                Step::Gone(number) if model.get(&number).is_some_and(|k| k.is_in_flight) => {}
                Step::Gone(number) => {
                    shard.gone(hash(number), &key(number), self.transaction);
                    match model.get_mut(&number) {
                        Some(known) if known.is_clean() => known.value = None,
                        Some(known) if known.loading.is_some() => {
                            model.remove(&number);
                        }
                        _ => {}
                    }
                }
                // Its transaction is not committed: nothing it removes is gone yet.
                Step::Forget(number) if model.get(&number).is_some_and(|k| k.is_in_flight) => {}
                Step::Forget(number) => {
                    let is_free = |known: &Known| known.is_clean() || known.loading.is_some();
                    shard.forget(hash(number), &key(number), self.transaction);
                    if model.get(&number).is_some_and(is_free) {
                        model.remove(&number);
                    }
                }
                Step::ShrinkTo(bytes) => {
                    if shard.shrink_to(bytes, self.transaction) {
                        assert!(shard.bytes() <= bytes);
                    }
                    // Which clean ones went is its own affair.
                    model.retain(|number, known| {
                        !known.is_clean() || shard.find(hash(*number), &key(*number)).is_some()
                    });
                }
            }
        }

        fn agree(&mut self) {
            let (shard, model) = (&mut self.shard, &self.model);
            let mut bytes = 0;
            for number in 0..24 {
                let (hash, key) = (hash(number), key(number));
                let entry = shard.find(hash, &key).and_then(|place| shard.get(place));
                let known = model.get(&number);
                assert_eq!(entry.is_some(), known.is_some(), "{key}");
                let (Some(entry), Some(known)) = (entry, known) else {
                    continue;
                };
                assert_eq!(entry.value, known.value, "{key}");
                assert_eq!(entry.is_loading(), known.loading.is_some(), "{key}");
                let is_pinned = known.is_dirty || known.is_in_flight;
                let is_pinned_there = shard.is_pinned(hash, &key, self.transaction);
                assert_eq!(is_pinned_there, is_pinned, "{key}");
                bytes += size_of::<Entry<Text>>() + OVERHEAD;
                bytes += key.elsewhere() + known.value.as_ref().map_or(0, Row::memory);
            }
            assert_eq!(shard.bytes(), bytes);
            assert_eq!(shard.index.len(), model.len());
            assert_eq!(shard.entries.len() - shard.vacant.len(), model.len());
            let (mut dirty, mut listed) = (shard.take_dirty(), Vec::new());
            dirty.sort_unstable();
            dirty.dedup();
            shard.keep_dirty(&dirty, self.transaction, &mut listed);
            let key_at = |position| shard.dirty_key(position, self.transaction).expect("dirty");
            let listed: Vec<_> = listed.into_iter().map(key_at).collect();
            for (number, known) in model {
                let times = listed.iter().filter(|listed| ***listed == key(*number));
                let expected = usize::from(known.is_dirty || known.is_in_flight);
                assert_eq!(times.count(), expected, "{number}");
            }
        }
    }

    /// Where the entry of `number` is; else any place.
    fn position_of(shard: &Shard<Text>, number: u8) -> u32 {
        shard.find(hash(number), &key(number)).unwrap_or(0)
    }

    /// The ticket of the load of `number` that is under way; else any.
    fn ticket_of(shard: &Shard<Text>, number: u8) -> u32 {
        let entry = shard.find(hash(number), &key(number));
        match entry.and_then(|place| shard.get(place)).map(|e| e.state) {
            Some(State::Loading(ticket)) => ticket,
            _ => shard.last_ticket,
        }
    }

    proptest! {
        #[test]
        fn a_shard_is_a_map_that_knows_what_the_file_lacks(steps in steps()) {
            let mut pair = Pair::default();
            for step in &steps {
                pair.take(step);
                pair.agree();
            }
        }
    }

    /// An index that is as full as it may be when an entry goes, too.
    #[test]
    fn an_entry_that_goes_takes_no_other_along() {
        for count in 1..24 {
            let mut pair = Pair::default();
            for number in 0..count {
                pair.take(&Step::BeginLoading(number));
            }
            pair.take(&Step::Forget(0));
            pair.agree();
        }
    }
}
