//! The bound: a table never holds more than `max_keys` rows.
//!
//! Clients choose the keys, so a table without a bound is a disk that an anonymous caller can fill.
//! The newcomer is never refused and never the victim. The victim is, among the heads of the
//! classes: a row that has expired; else one that a clock which ran ahead has filed too late; else
//! the one whose last write is oldest. Within a class the heads come in the order of last writes.

use redb::StorageError;

use super::deadline::Entry;
use super::table::{OpenTable, Stored};

/// How many renewed heads one eviction files anew before it takes the best of those it sees.
const LOOKS: usize = 64;

/// Who goes first: smaller goes before larger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    Expired,
    Ahead,
    LastWrite(u64),
}

impl OpenTable<'_> {
    /// Evicts what a newcomer displaces: one row of a full table, two of one above its bound.
    pub(super) fn make_room(&mut self, now: u64) -> Result<(), StorageError> {
        let surplus = self.surplus(1)?;
        for _ in 0..surplus.min(2) {
            self.evict(now)?;
        }
        Ok(())
    }

    /// Brings a table above its bound closer to it by at most `budget` rows.
    pub(super) fn shrink(&mut self, now: u64, budget: usize) -> Result<usize, StorageError> {
        let mut spent = 0;
        while spent < budget && self.surplus(0)? > 0 && self.evict(now)? {
            spent += 1;
        }
        Ok(spent)
    }

    /// How many rows are too many once `newcomers` are in.
    fn surplus(&self, newcomers: u64) -> Result<u64, StorageError> {
        let rows = self.len()?.saturating_add(newcomers);
        Ok(rows.saturating_sub(self.table.settings.max_keys))
    }

    /// Removes the victim, if there is any row.
    fn evict(&mut self, now: u64) -> Result<bool, StorageError> {
        let Some((rank, victim)) = self.victim(now)? else {
            return Ok(false);
        };
        if rank == Rank::Expired {
            self.effects.swept += 1;
        } else {
            self.effects.evicted += 1;
        }
        let stored = self.read(&victim.key)?;
        self.delete(&victim.key, &stored.found())?;
        if matches!(stored, Stored::Damaged(_)) {
            self.drop_entry(&victim)?;
        }
        Ok(true)
    }

    fn victim(&mut self, now: u64) -> Result<Option<(Rank, Entry)>, StorageError> {
        let mut looks = LOOKS;
        let mut best: Option<(Rank, Entry)> = None;
        for class in self.deadlines.classes()? {
            let head = self.settled_head(class, now, &mut looks)?;
            let tail = self.tail_ahead(class, now, &mut looks)?;
            for candidate in [head, tail].into_iter().flatten() {
                if best.as_ref().is_none_or(|(rank, _)| candidate.0 < *rank) {
                    best = Some(candidate);
                }
            }
        }
        Ok(best)
    }

    /// The head of `class`, once the renewed rows before it are filed anew; if there are too many to
    /// look at, the one of them whose last write is oldest.
    fn settled_head(
        &mut self,
        class: u64,
        now: u64,
        looks: &mut usize,
    ) -> Result<Option<(Rank, Entry)>, StorageError> {
        let mut oldest: Option<(Rank, Entry)> = None;
        while let Some(head) = self.deadlines.head(class)? {
            let (header, value) = match self.read(&head.key)? {
                Stored::Whole(header, value) => (header, value),
                Stored::Damaged(_) => {
                    let ttl = class.min(head.filed_at);
                    return Ok(Some((Rank::LastWrite(head.filed_at - ttl), head)));
                }
                Stored::Missing => {
                    self.drop_entry(&head)?;
                    continue;
                }
            };
            if Entry::of(&head.key, &header) != head {
                self.drop_entry(&head)?;
                continue;
            }
            if header.has_expired(now) {
                return Ok(Some((Rank::Expired, head)));
            }
            let last_write = Rank::LastWrite(header.last_write());
            // Those before it were written later, or they would not be filed after it.
            if header.filed_at == header.expires_at {
                return Ok(Some((last_write, head)));
            }
            let is_older = oldest.as_ref().is_none_or(|(rank, _)| last_write < *rank);
            if *looks == 0 {
                return Ok(if is_older {
                    Some((last_write, head))
                } else {
                    oldest
                });
            }
            *looks -= 1;
            self.refile_renewed(&head, header, &value)?;
            if is_older {
                let filed_at = header.expires_at;
                oldest = Some((last_write, Entry { filed_at, ..head }));
            }
        }
        Ok(None)
    }

    /// The last row of `class`, if a clock which ran ahead has filed it.
    fn tail_ahead(
        &self,
        class: u64,
        now: u64,
        looks: &mut usize,
    ) -> Result<Option<(Rank, Entry)>, StorageError> {
        let mut passed = None;
        while let Some(tail) = self.deadlines.tail(class, passed.as_ref())? {
            match self.read(&tail.key)? {
                Stored::Whole(header, _) => {
                    let is_its_own = Entry::of(&tail.key, &header) == tail;
                    let ahead = is_its_own && tail.is_ahead(header.ttl, now);
                    return Ok(ahead.then_some((Rank::Ahead, tail)));
                }
                // It says nothing of the rows before it.
                Stored::Damaged(_) if *looks > 0 => *looks -= 1,
                Stored::Damaged(_) | Stored::Missing => return Ok(None),
            }
            passed = Some(tail);
        }
        Ok(None)
    }
}
