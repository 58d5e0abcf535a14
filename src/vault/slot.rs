//! `Slot`: the one row that an `update` closure reads and writes.

use std::time::Duration;

use super::codec;
use super::key::Key;
use super::row::Row;
use super::table::{Stored, Table};
use crate::clock::{Timestamp, whole_millis};
use crate::error::{Error, Result};

/// What an [`update`](super::Vault::update) closure finds in a key's place, and what it leaves.
///
/// Nothing is written while the closure runs: [`put`](Self::put) and [`remove`](Self::remove) are
/// applied after it returned, the last one counts, and a row that neither was called on stays as
/// it was.
#[derive(Debug)]
pub struct Slot<V> {
    value: Option<V>,
    expires_at: Option<Timestamp>,
    now: Timestamp,
    found: bool,
    change: Change,
    original: Original,
}

/// What a closure did to a row.
#[derive(Clone, Copy, Debug)]
pub(super) enum Change {
    Keep,
    Put { ttl: Duration },
    Remove,
}

/// What is kept of a row, to fall back on if the closure panics or leaves nothing.
#[derive(Debug)]
enum Original {
    /// Nothing: it is in the file.
    InFile,
    /// A copy is made once the value is about to change.
    Unchanged,
    /// As the value was encoded; `None`: there was none.
    Copy(Option<Vec<u8>>),
    /// The value is changed in its place, by code that does not panic.
    InPlace,
}

/// A change as bytes, ready for the transaction.
#[derive(Debug)]
pub(super) enum Staged {
    Keep,
    Put { value: Vec<u8>, ttl_ms: u64 },
    Remove,
}

/// What an operation makes of a row that fails its checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IfDamaged {
    /// It reads the value, so the row is an error.
    Refuse,
    /// It does not read the value, so the row may go.
    Replace,
}

impl<V: Row> Slot<V> {
    /// The instant of this operation, by the vault's clock.
    #[must_use]
    pub const fn now(&self) -> Timestamp {
        self.now
    }

    /// The value; `None` if there is no row or it has expired.
    #[must_use]
    pub const fn value(&self) -> Option<&V> {
        self.value.as_ref()
    }

    /// When the row found here ends; `None` if there is none or it has expired.
    #[must_use]
    pub const fn expires_at(&self) -> Option<Timestamp> {
        self.expires_at
    }

    /// Takes the value out of the slot, to change it and [`put`](Self::put) it back.
    ///
    /// The row itself stays as it was unless something is put or removed.
    pub fn take(&mut self) -> Option<V> {
        self.keep_original();
        if matches!(self.change, Change::Put { .. }) {
            self.change = Change::Keep;
        }
        self.value.take()
    }

    /// Leaves `value` here, to live for `ttl` from [`now`](Self::now); a part of a millisecond is
    /// dropped.
    pub fn put(&mut self, value: V, ttl: Duration) {
        self.keep_original();
        self.value = Some(value);
        self.change = Change::Put { ttl };
    }

    /// Leaves nothing here.
    pub fn remove(&mut self) {
        self.keep_original();
        self.value = None;
        self.change = Change::Remove;
    }

    /// The value, changed in its place; it stays changed. `cannot_panic`: whoever changes it.
    pub(crate) fn state(&mut self, cannot_panic: bool) -> &mut V
    where
        V: Default,
    {
        if cannot_panic && matches!(self.original, Original::Unchanged) {
            self.original = Original::InPlace;
        }
        self.keep_original();
        self.value.get_or_insert_default()
    }

    /// Has the value, changed in its place, live for `ttl` from now.
    pub(crate) const fn renew(&mut self, ttl: Duration) {
        self.change = Change::Put { ttl };
    }

    /// Whether a row was found that is live, or damaged.
    pub(super) const fn found(&self) -> bool {
        self.found
    }

    fn keep_original(&mut self) {
        if matches!(self.original, Original::Unchanged) {
            // It was stored before, or could have been: it can be encoded.
            let copy = self.value.as_ref();
            self.original = Original::Copy(copy.and_then(|value| codec::encode(value).ok()));
        }
    }

    pub(super) const fn empty(now: Timestamp) -> Self {
        Self {
            value: None,
            expires_at: None,
            now,
            found: false,
            change: Change::Keep,
            original: Original::InFile,
        }
    }

    /// Of a row whose newest value may be in memory only.
    pub(super) const fn in_memory(
        live: Option<V>,
        expires_at: Timestamp,
        now: Timestamp,
        found_damage: bool,
    ) -> Self {
        Self {
            expires_at: if live.is_some() {
                Some(expires_at)
            } else {
                None
            },
            found: live.is_some() || found_damage,
            value: live,
            now,
            change: Change::Keep,
            original: Original::Unchanged,
        }
    }

    /// What the closure did, if what it left can be stored.
    pub(super) fn checked_change(&self, table: &str, key: &Key) -> Result<Change> {
        if let (Change::Put { .. }, Some(value)) = (self.change, &self.value)
            && !matches!(self.original, Original::InPlace)
        {
            encoded(value, table, key)?;
        }
        Ok(self.change)
    }

    pub(super) fn into_value(self) -> Option<V> {
        self.value
    }

    /// The value as it was found.
    pub(super) fn into_original(self) -> Option<V> {
        match self.original {
            Original::Copy(copy) => copy.and_then(|copy| codec::decode(&copy)),
            Original::InFile | Original::Unchanged | Original::InPlace => self.value,
        }
    }

    pub(super) fn fill(
        table: &Table,
        key: &Key,
        stored: &Stored,
        now: Timestamp,
        if_damaged: IfDamaged,
    ) -> Result<Self> {
        let mut slot = Self::empty(now);
        match stored {
            Stored::Whole(header, _) if header.has_expired(now.as_millis()) => {}
            Stored::Missing => {}
            _ if if_damaged == IfDamaged::Replace => slot.found = true,
            Stored::Whole(header, bytes) => {
                slot.value = Some(codec::decode(bytes).ok_or_else(|| table.corrupt_row(key))?);
                slot.expires_at = Some(Timestamp::from_millis(header.expires_at));
                slot.found = true;
            }
            Stored::Damaged(_) => return Err(table.corrupt_row(key)),
        }
        Ok(slot)
    }

    pub(super) fn stage(self, table: &Table, key: &Key) -> Result<Staged> {
        Ok(match (self.change, self.value) {
            (Change::Put { ttl }, Some(value)) => Staged::Put {
                value: encoded(&value, &table.name, key)?,
                ttl_ms: ttl_ms(ttl),
            },
            (Change::Remove, _) => Staged::Remove,
            _ => Staged::Keep,
        })
    }
}

fn encoded<V: Row>(value: &V, table: &str, key: &Key) -> Result<Vec<u8>> {
    codec::encode(value).map_err(|source| Error::Encode {
        table: table.to_owned(),
        key: key.to_string(),
        source,
    })
}

pub(super) fn ttl_ms(ttl: Duration) -> u64 {
    whole_millis(ttl).min(LONGEST_TTL_MS)
}

/// Leaves the last class of the deadline index to the rows that share it.
const LONGEST_TTL_MS: u64 = u64::MAX - 1;
