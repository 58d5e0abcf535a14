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
}

#[derive(Debug)]
enum Change {
    Keep,
    Put { ttl: Duration },
    Remove,
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

impl<V> Slot<V> {
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
        if matches!(self.change, Change::Put { .. }) {
            self.change = Change::Keep;
        }
        self.value.take()
    }

    /// Leaves `value` here, to live for `ttl` from [`now`](Self::now); a part of a millisecond is
    /// dropped.
    pub fn put(&mut self, value: V, ttl: Duration) {
        self.value = Some(value);
        self.change = Change::Put { ttl };
    }

    /// Leaves nothing here.
    pub fn remove(&mut self) {
        self.value = None;
        self.change = Change::Remove;
    }

    /// Whether a row was found that is live, or damaged.
    pub(super) const fn found(&self) -> bool {
        self.found
    }
}

impl<V: Row> Slot<V> {
    pub(super) const fn empty(now: Timestamp) -> Self {
        Self {
            value: None,
            expires_at: None,
            now,
            found: false,
            change: Change::Keep,
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
                value: codec::encode(&value).map_err(|source| Error::Encode {
                    table: table.name.clone(),
                    key: key.to_string(),
                    source,
                })?,
                ttl_ms: whole_millis(ttl).min(LONGEST_TTL_MS),
            },
            (Change::Remove, _) => Staged::Remove,
            _ => Staged::Keep,
        })
    }
}

/// Leaves the last class of the deadline index to the rows that share it.
const LONGEST_TTL_MS: u64 = u64::MAX - 1;
