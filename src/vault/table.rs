//! One table inside a write transaction: rows, and the deadline index that goes with them.
//!
//! Everything that changes a row goes through here, so that the index's invariant is kept in one
//! place. The bound and the sweep are in rooms of their own.

use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use redb::{ReadableTable, ReadableTableMetadata, TableDefinition, WriteTransaction};

use super::deadline::{Deadlines, Entry};
use super::key::{Key, corrupt_row};
use super::overlay::Buffer;
use super::row::{self, Header};
use super::settings::TableSettings;
use crate::error::Error;

/// A table of an open file, shared by its handles and the writer.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) name: String,
    pub(super) kind: &'static str,
    pub(super) settings: TableSettings,
    /// The rows in memory in front of it, if it is buffered.
    pub(super) buffer: Option<Arc<dyn Buffer>>,
    /// Whether its stamp was found to be right, or set: until then no row may be touched.
    ready: AtomicBool,
    /// No row is filed earlier than this, in ms; 0: unknown, so look. Only the writer writes it.
    pub(super) due: AtomicU64,
    /// How many rows there were when somebody last asked.
    pub(super) last_rows: AtomicU64,
    /// Rows that the bound forgot before they expired, since the file was opened.
    pub(super) evicted: AtomicU64,
    /// Rows that were removed after they expired, since the file was opened.
    pub(super) swept: AtomicU64,
}

/// The redb table of rows: Key = an encoded [`Key`], Value = an encoded row.
pub(super) fn rows(name: &str) -> TableDefinition<'_, &'static [u8], &'static [u8]> {
    TableDefinition::new(name)
}

pub(super) const ROWS_PREFIX: &str = "rows:";

pub(super) fn rows_name(table: &str) -> String {
    format!("{ROWS_PREFIX}{table}")
}

/// The redb table of the deadline index: Key = an encoded entry, no value.
fn deadlines_name(table: &str) -> String {
    format!("deadlines:{table}")
}

/// What a key's place in the rows holds.
#[derive(Debug)]
pub(crate) enum Stored {
    Missing,
    Whole(Header, Vec<u8>),
    /// It fails its checksum; the header is a guess.
    Damaged(Option<Header>),
}

impl Stored {
    pub(super) fn read(key: &[u8], bytes: Option<&[u8]>) -> Self {
        let Some(bytes) = bytes else {
            return Self::Missing;
        };
        match row::decode(key, bytes) {
            Some((header, value)) => Self::Whole(header, value.to_vec()),
            None => Self::Damaged(row::guess_header(bytes)),
        }
    }

    /// When a row that is whole ends, and its value.
    pub(crate) fn whole(&self) -> Option<(u64, &[u8])> {
        match self {
            Self::Whole(header, value) => Some((header.expires_at, value)),
            Self::Damaged(_) | Self::Missing => None,
        }
    }

    /// The same, short of the value.
    pub(super) const fn found(&self) -> Found {
        match self {
            Self::Missing => Found::Nothing,
            Self::Whole(header, _) => Found::Whole(*header),
            Self::Damaged(guess) => Found::Damaged(*guess),
        }
    }
}

/// What a write has to know of the row that it replaces.
#[derive(Clone, Copy, Debug)]
pub(super) enum Found {
    Nothing,
    Whole(Header),
    /// Its row fails its checksum; the header is a guess.
    Damaged(Option<Header>),
}

impl Found {
    const fn header(&self) -> Option<&Header> {
        match self {
            Self::Whole(header) => Some(header),
            Self::Damaged(guess) => guess.as_ref(),
            Self::Nothing => None,
        }
    }
}

/// What one transaction did to a table; counted once it is committed.
#[derive(Debug, Default)]
pub(super) struct Effects {
    pub(super) changed: bool,
    /// The table's stamp is right.
    pub(super) ready: bool,
    pub(super) evicted: u64,
    pub(super) swept: u64,
    /// The keys of rows that left, if the table is buffered.
    pub(super) gone: Vec<Key>,
    /// The keys of rows that the sweep changed, if the table is buffered.
    pub(super) redated: Vec<Key>,
    /// The earliest deadline that was filed.
    pub(super) filed: Option<u64>,
    /// What the sweep found to be the earliest deadline left; 0: there is more to do.
    pub(super) due: Option<u64>,
}

/// A table, open in a write transaction.
#[derive(Debug)]
pub(super) struct OpenTable<'t> {
    pub(super) table: Arc<Table>,
    pub(super) rows: redb::Table<'t, &'static [u8], &'static [u8]>,
    pub(super) deadlines: Deadlines<'t>,
    pub(super) effects: Effects,
    /// The bytes of the row that was written last.
    row: Vec<u8>,
}

impl<'t> OpenTable<'t> {
    /// Opens both redb tables, creating those that are not there.
    pub(super) fn open(
        txn: &'t WriteTransaction,
        table: Arc<Table>,
    ) -> Result<Self, redb::TableError> {
        let rows = txn.open_table(rows(&rows_name(&table.name)))?;
        let deadlines = txn.open_table(TableDefinition::new(&deadlines_name(&table.name)))?;
        Ok(Self {
            table,
            rows,
            deadlines: Deadlines(deadlines),
            effects: Effects::default(),
            row: Vec::new(),
        })
    }

    pub(super) fn read(&self, key: &[u8]) -> Result<Stored, redb::StorageError> {
        let found = self.rows.get(key)?;
        Ok(Stored::read(key, found.as_ref().map(|row| row.value())))
    }

    /// What [`read`](Self::read) finds, short of the value.
    pub(super) fn find(&self, key: &[u8]) -> Result<Found, redb::StorageError> {
        let Some(row) = self.rows.get(key)? else {
            return Ok(Found::Nothing);
        };
        let bytes = row.value();
        Ok(match row::decode(key, bytes) {
            Some((header, _)) => Found::Whole(header),
            None => Found::Damaged(row::guess_header(bytes)),
        })
    }

    /// Writes the row of `key`, where `before` is what its place held, and files it.
    ///
    /// A renewal that only moves the deadline later leaves the entry alone. A newcomer makes the
    /// table evict another row if it is full.
    pub(super) fn write(
        &mut self,
        key: &[u8],
        before: &Found,
        value: &[u8],
        ttl: u64,
        expires_at: u64,
        now: u64,
    ) -> Result<(), redb::StorageError> {
        let header = match before {
            Found::Whole(header) if header.ttl == ttl && header.filed_at <= expires_at => Header {
                expires_at,
                ..*header
            },
            _ => self.file_anew(key, before, ttl, expires_at, now)?,
        };
        self.put_row(key, header, value)
    }

    /// Files a row that is new, or whose entry has to move; a newcomer is given room.
    fn file_anew(
        &mut self,
        key: &[u8],
        before: &Found,
        ttl: u64,
        expires_at: u64,
        now: u64,
    ) -> Result<Header, redb::StorageError> {
        if let Some(header) = before.header() {
            self.deadlines.remove(&Entry::of(key, header))?;
        }
        if matches!(before, Found::Nothing) {
            self.make_room(now)?;
        }
        let header = Header {
            in_shared_class: self.deadlines.shares_class(ttl)?,
            expires_at,
            ttl,
            filed_at: expires_at,
        };
        self.file(&Entry::of(key, &header))?;
        Ok(header)
    }

    /// Removes the row of `key`, where `before` is what its place holds, and its entry.
    pub(super) fn delete(&mut self, key: &[u8], before: &Found) -> Result<(), redb::StorageError> {
        if let Some(header) = before.header() {
            self.deadlines.remove(&Entry::of(key, header))?;
        }
        if self.rows.remove(key)?.is_some() {
            self.effects.changed = true;
            self.disown(key);
        }
        Ok(())
    }

    /// Takes note that there is no row any more: nor is there one in memory.
    pub(super) fn disown(&mut self, key: &[u8]) {
        if self.table.buffer.is_some() {
            self.effects.gone.push(Key::of_bytes(key));
        }
    }

    /// Takes note that a copy in memory is no longer what the file has.
    pub(super) fn outdate(&mut self, key: &[u8]) {
        if self.table.buffer.is_some() {
            self.effects.redated.push(Key::of_bytes(key));
        }
    }

    /// Moves a whole row's entry, and its deadline with it if that is given.
    pub(super) fn refile(
        &mut self,
        entry: &Entry,
        header: Header,
        value: &[u8],
    ) -> Result<(), redb::StorageError> {
        self.deadlines.remove(entry)?;
        self.file(&Entry::of(&entry.key, &header))?;
        self.put_row(&entry.key, header, value)
    }

    /// Drops an entry that no row states.
    pub(super) fn drop_entry(&mut self, entry: &Entry) -> Result<(), redb::StorageError> {
        self.effects.changed = true;
        self.deadlines.remove(entry)
    }

    pub(super) fn file(&mut self, entry: &Entry) -> Result<(), redb::StorageError> {
        self.effects.changed = true;
        let filed = self.effects.filed.unwrap_or(u64::MAX);
        self.effects.filed = Some(filed.min(entry.filed_at));
        self.deadlines.insert(entry)
    }

    fn put_row(
        &mut self,
        key: &[u8],
        header: Header,
        value: &[u8],
    ) -> Result<(), redb::StorageError> {
        self.effects.changed = true;
        self.row.clear();
        row::encode_into(key, header, value, &mut self.row);
        self.rows.insert(key, &*self.row).map(drop)
    }

    pub(super) fn len(&self) -> Result<u64, redb::StorageError> {
        self.rows.len()
    }

    /// The keys of the first `count` rows after `after` whose keys start with `prefix`.
    pub(super) fn keys_with(
        &self,
        prefix: &[u8],
        after: Option<&[u8]>,
        count: usize,
    ) -> Result<Vec<Vec<u8>>, redb::StorageError> {
        let mut keys = Vec::new();
        let from = after.map_or(Bound::Included(prefix), Bound::Excluded);
        let range = self.rows.range::<&[u8]>((from, Bound::Unbounded))?;
        for found in range.take(count) {
            let (key, _) = found?;
            if !key.value().starts_with(prefix) {
                break;
            }
            keys.push(key.value().to_vec());
        }
        Ok(keys)
    }
}

impl Table {
    pub(super) fn new(
        name: &str,
        kind: &'static str,
        settings: TableSettings,
        buffer: Option<Arc<dyn Buffer>>,
    ) -> Self {
        Self {
            name: name.to_owned(),
            kind,
            settings,
            buffer,
            ready: AtomicBool::new(false),
            due: AtomicU64::new(0),
            last_rows: AtomicU64::new(0),
            evicted: AtomicU64::new(0),
            swept: AtomicU64::new(0),
        }
    }

    pub(super) fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }

    /// How long until a flush is due; `None`: nothing is dirty.
    pub(super) fn flush_in(&self) -> Option<Duration> {
        self.buffer.as_ref().and_then(|buffer| buffer.flush_in())
    }

    /// Whether the newest value of `key` is only in memory.
    pub(super) fn is_pinned(&self, key: &[u8]) -> bool {
        let key = Key::of_bytes(key);
        self.buffer
            .as_ref()
            .is_some_and(|buffer| buffer.is_pinned(&key))
    }

    pub(super) fn corrupt_row(&self, key: &Key) -> Error {
        corrupt_row(&self.name, key.as_bytes())
    }

    /// Whether a row may be due at `now`, so that the sweep should look.
    pub(super) fn may_be_due(&self, now: u64) -> bool {
        self.due.load(Ordering::Relaxed) <= now
    }

    /// Takes note that a transaction may or may not have done this: what memory has of the rows is to be
    /// read anew.
    pub(super) fn doubt(&self, effects: &Effects) {
        if let Some(buffer) = &self.buffer {
            buffer.forget(&effects.gone);
            buffer.forget(&effects.redated);
        }
    }

    /// Takes note of what a committed transaction did.
    pub(super) fn record(&self, effects: &Effects) {
        let order = Ordering::Relaxed;
        if effects.ready {
            self.ready.store(true, Ordering::Release);
        }
        if let Some(buffer) = &self.buffer {
            buffer.are_gone(&effects.gone);
            buffer.forget(&effects.redated);
        }
        self.evicted.fetch_add(effects.evicted, order);
        self.swept.fetch_add(effects.swept, order);
        if let Some(due) = effects.due {
            self.due.store(due, order);
        }
        if let Some(filed) = effects.filed {
            self.due.fetch_min(filed, order);
        }
    }
}
