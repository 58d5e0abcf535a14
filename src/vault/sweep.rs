//! The sweep: rows that have expired leave the file.
//!
//! It follows the deadline index, so it costs what has expired, not what is stored. It also looks
//! at the end of every class, where rows gather whose clock ran ahead, and it brings a table back
//! to a bound that was lowered.

use redb::StorageError;

use super::deadline::{Entry, SHARED};
use super::row::Header;
use super::table::{OpenTable, Stored};

/// How many entries one transaction looks at.
pub(super) const SWEEP_LIMIT: usize = 1_000;

impl OpenTable<'_> {
    /// Looks at up to `budget` entries and says how many it looked at.
    ///
    /// What is left to do, and when, is left in the effects.
    pub(super) fn sweep(&mut self, now: u64, budget: usize) -> Result<usize, StorageError> {
        let (mut spent, mut passed) = (0, 0);
        let mut next_due = u64::MAX;
        for class in self.deadlines.classes()? {
            spent += self.redate_tail(class, now, budget - spent)?;
            // The flush will write such a row anew, or remove it.
            let is_pinned = |entry: &Entry| self.table.is_pinned(&entry.key);
            let (due, pinned) = self.deadlines.due(class, now, budget - spent, is_pinned)?;
            spent += due.len();
            passed += pinned;
            for entry in &due {
                self.settle(entry, now)?;
            }
            let head = self.deadlines.head(class)?;
            next_due = next_due.min(head.map_or(u64::MAX, |entry| entry.filed_at));
        }
        spent += self.shrink(now, budget - spent)?;
        self.effects.due = Some(match next_due <= now {
            _ if spent >= budget => 0,
            // Not before the flush had its time.
            true if passed > 0 => now,
            true => 0,
            false => next_due,
        });
        // What was filed on the way is among the heads.
        self.effects.filed = None;
        Ok(spent)
    }

    /// Deals with an entry that is due: the row leaves if it has expired, else it is filed anew.
    fn settle(&mut self, entry: &Entry, now: u64) -> Result<(), StorageError> {
        let stored = self.read(&entry.key)?;
        match &stored {
            Stored::Whole(header, _) if Entry::of(&entry.key, header) != *entry => {
                self.drop_entry(entry)
            }
            Stored::Whole(header, _) if header.has_expired(now) => {
                self.effects.swept += 1;
                self.delete(&entry.key, &stored.found())
            }
            Stored::Whole(header, value) => self.refile_renewed(entry, *header, value),
            Stored::Damaged(_) => self.postpone_damaged(entry, look_again_at(entry.class, now)),
            Stored::Missing => self.drop_entry(entry),
        }
    }

    /// Files a row that was renewed under its deadline.
    pub(super) fn refile_renewed(
        &mut self,
        entry: &Entry,
        header: Header,
        value: &[u8],
    ) -> Result<(), StorageError> {
        let filed_at = header.expires_at;
        self.refile(entry, Header { filed_at, ..header }, value)
    }

    /// A damaged row stays until it is removed, or until the bound forgets it: when it ends is not
    /// known, and forgetting it would start a fresh count.
    fn postpone_damaged(&mut self, entry: &Entry, filed_at: u64) -> Result<(), StorageError> {
        self.drop_entry(entry)?;
        self.file(&Entry {
            filed_at,
            ..entry.clone()
        })
    }

    /// Dates rows back that a clock which ran ahead has filed too late, at most `budget`.
    ///
    /// Damaged rows that lie where they belong are passed over, and are no work done: else many of
    /// them would look like work that never ends.
    fn redate_tail(&mut self, class: u64, now: u64, budget: usize) -> Result<usize, StorageError> {
        let (mut spent, mut passes, mut passed) = (0, 0, None);
        while spent < budget
            && passes < MOST_PASSES
            && let Some(entry) = self.deadlines.tail(class, passed.as_ref())?
        {
            match self.read(&entry.key)? {
                Stored::Whole(header, _) if Entry::of(&entry.key, &header) != entry => {
                    self.drop_entry(&entry)?;
                }
                Stored::Missing => self.drop_entry(&entry)?,
                Stored::Whole(header, value) if entry.is_ahead(header.ttl, now) => {
                    let expires_at = now.saturating_add(header.ttl);
                    let header = Header {
                        expires_at,
                        filed_at: expires_at,
                        ..header
                    };
                    self.refile(&entry, header, &value)?;
                    self.outdate(&entry.key);
                }
                Stored::Whole(..) => break,
                // It says nothing of the rows before it.
                Stored::Damaged(_) if entry.filed_at > look_again_at(class, now) => {
                    self.postpone_damaged(&entry, look_again_at(class, now))?;
                }
                Stored::Damaged(_) => {
                    passed = Some(entry);
                    passes += 1;
                    continue;
                }
            }
            spent += 1;
        }
        Ok(spent)
    }
}

/// When the sweep is to come across a damaged row again.
fn look_again_at(class: u64, now: u64) -> u64 {
    let ttl = if class == SHARED { 0 } else { class };
    now.saturating_add(ttl).saturating_add(SHORTEST_WAIT_MS)
}

/// How many damaged rows at the end of a class are passed over to look behind them.
const MOST_PASSES: usize = 64;

/// How long the sweep leaves a damaged row of the shared class alone.
const SHORTEST_WAIT_MS: u64 = 60_000;
