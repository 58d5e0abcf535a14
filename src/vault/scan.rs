//! Reading a table from end to end, a page at a time.

use std::marker::PhantomData;
use std::ops::Bound;
use std::sync::Arc;

use redb::{ReadTransaction, ReadableTableMetadata};

use super::codec;
use super::file::OpenFile;
use super::key::{Key, corrupt_row};
use super::row::Row;
use super::table::{self, Stored, Table, rows_name};
use crate::clock::Timestamp;
use crate::error::{Error, Result};

/// How many rows one read transaction looks at. It is let go of between pages, so that a slow
/// reader does not keep the file from reusing space.
const PAGE_ROWS: usize = 1_000;

/// How many bytes of rows one read transaction looks at, if they are large.
const PAGE_BYTES: usize = 8 << 20;

/// A row that a scan found.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Entry<V> {
    /// The row's key.
    pub key: Key,
    /// Its value.
    pub value: V,
    /// When it ends.
    pub expires_at: Timestamp,
}

/// The live rows of a table, in the order of their keys: see [`Vault::scan`](super::Vault::scan).
#[derive(Debug)]
pub struct Scan<V> {
    file: Arc<OpenFile>,
    table: Arc<Table>,
    page: std::vec::IntoIter<(Vec<u8>, Stored)>,
    /// Where the next page begins; `None`: there is none.
    next: Option<Bound<Vec<u8>>>,
    /// What kept the scan from beginning.
    failure: Option<Error>,
    value: PhantomData<fn() -> V>,
}

impl<V: Row> Scan<V> {
    /// `flushed`: whether what was in memory only is in the file.
    pub(super) fn new(file: Arc<OpenFile>, table: Arc<Table>, flushed: Result<()>) -> Self {
        Self {
            file,
            table,
            page: Vec::new().into_iter(),
            next: flushed.is_ok().then_some(Bound::Unbounded),
            failure: flushed.err(),
            value: PhantomData,
        }
    }

    /// Reads the next page, and says whether there was one.
    fn turn(&mut self) -> Result<bool> {
        let Some(from) = self.next.take() else {
            return Ok(false);
        };
        let table = &self.table.name;
        let read = |txn: &ReadTransaction| Page::read(txn, table, &[], &from, PAGE_ROWS);
        let page = self.file.shared().read(read)?;
        if !page.is_last {
            let last = page.rows.last();
            self.next = last.map(|(key, _)| Bound::Excluded(key.clone()));
        }
        self.page = page.rows.into_iter();
        Ok(true)
    }

    /// The entry that a row is, unless it has expired.
    fn entry(&self, bytes: &[u8], stored: &Stored) -> Option<Result<Entry<V>>> {
        let damaged = || corrupt_row(&self.table.name, bytes);
        let Stored::Whole(header, value) = stored else {
            return Some(Err(damaged()));
        };
        if header.has_expired(self.file.shared().settings.clock.now().as_millis()) {
            return None;
        }
        let entry = Key::decode(bytes).zip(codec::decode(value));
        Some(entry.ok_or_else(damaged).map(|(key, value)| Entry {
            key,
            value,
            expires_at: Timestamp::from_millis(header.expires_at),
        }))
    }
}

impl<V: Row> Iterator for Scan<V> {
    type Item = Result<Entry<V>>;

    fn next(&mut self) -> Option<Self::Item> {
        if let Some(failure) = self.failure.take() {
            return Some(Err(failure));
        }
        loop {
            while let Some((key, stored)) = self.page.next() {
                if let Some(entry) = self.entry(&key, &stored) {
                    return Some(entry);
                }
            }
            match self.turn() {
                Ok(true) => {}
                Ok(false) => return None,
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

/// Rows that one transaction found, in the order of their keys.
pub(crate) struct Page {
    pub(crate) rows: Vec<(Vec<u8>, Stored)>,
    /// How many rows the table states to hold.
    pub(crate) stated: u64,
    /// Whether nothing comes after them.
    pub(crate) is_last: bool,
}

impl Page {
    /// The next rows whose keys start with `prefix`: `most` of them, or as many as make up 8 MiB.
    pub(super) fn read(
        txn: &ReadTransaction,
        name: &str,
        prefix: &[u8],
        from: &Bound<Vec<u8>>,
        most: usize,
    ) -> Result<Self, redb::Error> {
        let rows = txn.open_table(table::rows(&rows_name(name)))?;
        let from = match from {
            Bound::Unbounded => Bound::Included(prefix),
            bound => bound.as_ref().map(Vec::as_slice),
        };
        let mut page = Self {
            rows: Vec::new(),
            stated: rows.len()?,
            is_last: true,
        };
        let mut bytes = 0;
        for found in rows.range::<&[u8]>((from, Bound::Unbounded))? {
            let (key, row) = found?;
            if !key.value().starts_with(prefix) {
                break;
            }
            if page.rows.len() >= most || bytes >= PAGE_BYTES {
                page.is_last = false;
                break;
            }
            bytes += key.value().len() + row.value().len();
            let stored = Stored::read(key.value(), Some(row.value()));
            page.rows.push((key.value().to_vec(), stored));
        }
        Ok(page)
    }
}
