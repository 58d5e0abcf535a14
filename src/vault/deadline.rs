//! The deadline index: which row to look at next, without looking at all of them.
//!
//! # Format 1
//!
//! An entry is a key of the table `deadlines:NAME`, without a value:
//!
//! | bytes | content |
//! |---|---|
//! | 8 | class: the row's ttl in ms, or all ones for the shared class, big endian |
//! | 8 | `filed_at`, ms since the Unix epoch, big endian |
//! | | the row's key |
//!
//! Within a class the order of deadlines is the order of last writes, which the bound needs. Only
//! the first 63 different ttls of a table have a class of their own; all others share the last.
//!
//! Invariant: every row has exactly one entry, under the `filed_at` that its header states, and
//! `filed_at` is not after `expires_at`. A row that is renewed keeps its entry until the sweep or
//! the bound comes across it, so that a busy key costs one index write per window.
//!
//! A row that was damaged and then removed may leave an entry behind; whoever comes across an entry
//! without its row drops it.

use redb::{AccessGuard, ReadableTable, StorageError, Table};

use super::row::Header;

/// The class of all rows whose ttl has no class of its own.
pub(super) const SHARED: u64 = u64::MAX;

/// How many classes a table has, the shared one included.
const CLASSES: usize = 64;

/// How much later than its ttl allows a row may be filed before its clock must have run ahead.
const AHEAD_MS: u64 = 1_000;

/// One entry of the index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) class: u64,
    pub(super) filed_at: u64,
    pub(super) key: Vec<u8>,
}

impl Entry {
    /// Where the row of `key` with this header is filed.
    pub(super) fn of(key: &[u8], header: &Header) -> Self {
        let class = if header.in_shared_class {
            SHARED
        } else {
            header.ttl
        };
        Self {
            class,
            filed_at: header.filed_at,
            key: key.to_vec(),
        }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        [&position(self.class, self.filed_at)[..], &self.key].concat()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (class, rest) = bytes.split_first_chunk()?;
        let (filed_at, key) = rest.split_first_chunk()?;
        Some(Self {
            class: u64::from_be_bytes(*class),
            filed_at: u64::from_be_bytes(*filed_at),
            key: key.to_vec(),
        })
    }

    /// Whether this is further ahead than a row of `ttl` can be filed at `now`.
    pub(super) fn is_ahead(&self, ttl: u64, now: u64) -> bool {
        self.filed_at > now.saturating_add(ttl).saturating_add(AHEAD_MS)
    }
}

fn position(class: u64, filed_at: u64) -> [u8; 16] {
    let bits = (u128::from(class) << 64) | u128::from(filed_at);
    bits.to_be_bytes()
}

/// How many entries a look at what is due passes over.
const MOST_LEFT_ALONE: usize = 10_000;

/// The index of one table, open in a write transaction.
#[derive(Debug)]
pub(super) struct Deadlines<'t>(pub(super) Table<'t, &'static [u8], ()>);

impl Deadlines<'_> {
    pub(super) fn insert(&mut self, entry: &Entry) -> Result<(), StorageError> {
        self.0.insert(&*entry.encode(), ()).map(drop)
    }

    pub(super) fn remove(&mut self, entry: &Entry) -> Result<(), StorageError> {
        self.0.remove(&*entry.encode()).map(drop)
    }

    /// The entry of `class` that is due first.
    pub(super) fn head(&self, class: u64) -> Result<Option<Entry>, StorageError> {
        decode(self.class(class)?.next())
    }

    /// The entry of `class` that is due last, or last before `before`.
    pub(super) fn tail(
        &self,
        class: u64,
        before: Option<&Entry>,
    ) -> Result<Option<Entry>, StorageError> {
        let Some(before) = before else {
            return decode(self.class(class)?.next_back());
        };
        let from = position(class, 0);
        decode(self.0.range(&from[..]..&*before.encode())?.next_back())
    }

    /// The first `count` entries of `class` that are due at `now`, in order, those aside that are
    /// `left_alone`; and how many of those there were, at most [`MOST_LEFT_ALONE`].
    pub(super) fn due(
        &self,
        class: u64,
        now: u64,
        count: usize,
        left_alone: impl Fn(&Entry) -> bool,
    ) -> Result<(Vec<Entry>, usize), StorageError> {
        let (mut entries, mut passed) = (Vec::new(), 0);
        for found in self.class(class)? {
            if entries.len() == count || passed == MOST_LEFT_ALONE {
                break;
            }
            match decode(Some(found))? {
                Some(entry) if entry.filed_at > now => break,
                Some(entry) if left_alone(&entry) => passed += 1,
                Some(entry) => entries.push(entry),
                None => break,
            }
        }
        Ok((entries, passed))
    }

    fn class(&self, class: u64) -> Result<redb::Range<'_, &'static [u8], ()>, StorageError> {
        let from = position(class, 0);
        match class.checked_add(1) {
            Some(next) => self.0.range(&from[..]..&position(next, 0)[..]),
            None => self.0.range(&from[..]..),
        }
    }

    /// The classes that have entries, at most 64, found by one seek each.
    pub(super) fn classes(&self) -> Result<Vec<u64>, StorageError> {
        let mut classes = Vec::new();
        let mut next = Some(0);
        while let Some(from) = next {
            let from = position(from, 0);
            let found = decode(self.0.range(&from[..]..)?.next())?;
            next = found.as_ref().and_then(|entry| entry.class.checked_add(1));
            classes.extend(found.map(|entry| entry.class));
        }
        Ok(classes)
    }

    /// Whether a row of `ttl` that is filed now belongs into the shared class.
    pub(super) fn shares_class(&self, ttl: u64) -> Result<bool, StorageError> {
        if self.head(ttl)?.is_some() {
            return Ok(false);
        }
        let own = self.classes()?.into_iter().filter(|class| *class != SHARED);
        Ok(own.count() >= CLASSES - 1)
    }
}

type Found<'a> = Result<(AccessGuard<'a, &'static [u8]>, AccessGuard<'a, ()>), StorageError>;

fn decode(found: Option<Found<'_>>) -> Result<Option<Entry>, StorageError> {
    let found = found.transpose()?;
    Ok(found.and_then(|(key, _)| Entry::decode(key.value())))
}
