//! The rows of a table, whatever their kind.

use std::ops::Bound;

use crate::clock::Timestamp;
use crate::error::Result;
use crate::limiter::{HitLog, WindowCount};
use crate::vault::{Entry, Key, Page, Reader, Row, Stored, TableInfo, corrupt_row, decode_value};

/// What a row holds, as its table's kind says.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum State {
    /// The row of a sliding window.
    SlidingLog(HitLog),
    /// The row of a fixed window.
    FixedWindow(WindowCount),
    /// The row of another kind, as it is encoded.
    Other(Vec<u8>),
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    SlidingLog,
    FixedWindow,
    Other,
}

/// The rows of a table: see [`Snapshot::rows`](super::Snapshot::rows).
///
/// A damaged row is an error, and the rows after it follow. If the file itself is found damaged,
/// that error is the last item.
#[derive(Debug)]
pub struct Rows<'s> {
    reader: &'s Reader,
    table: String,
    kind: Kind,
    prefix: Vec<u8>,
    page: std::vec::IntoIter<(Vec<u8>, Stored)>,
    /// Where the next page begins; `None`: there is none.
    next: Option<Bound<Vec<u8>>>,
    last_key: Option<Vec<u8>>,
    met: u64,
    stated: u64,
}

impl<'s> Rows<'s> {
    pub(super) fn new(reader: &'s Reader, table: &TableInfo) -> Self {
        Self {
            reader,
            table: table.name.clone(),
            kind: match &*table.kind {
                HitLog::KIND => Kind::SlidingLog,
                WindowCount::KIND => Kind::FixedWindow,
                _ => Kind::Other,
            },
            prefix: Vec::new(),
            page: Vec::new().into_iter(),
            next: Some(Bound::Unbounded),
            last_key: None,
            met: 0,
            stated: table.rows,
        }
    }

    /// Only the rows of `endpoint`. It costs what those are, not what the table holds.
    ///
    /// # Errors
    ///
    /// [`Error::EndpointTooLong`](crate::Error::EndpointTooLong).
    pub fn endpoint(mut self, endpoint: &str) -> Result<Self> {
        self.prefix = Key::prefix(endpoint)?;
        Ok(self)
    }

    /// How many rows were met so far, damaged ones included.
    #[must_use]
    pub const fn met(&self) -> u64 {
        self.met
    }

    /// How many rows the table stated to hold when the latest page was read.
    ///
    /// At the end of a whole table it differs from [`met`](Self::met) by what came and went
    /// meanwhile. That a table read in one transaction has another number of rows is an error.
    #[must_use]
    pub const fn stated(&self) -> u64 {
        self.stated
    }

    /// Reads the next page, and says whether there was one.
    fn turn(&mut self) -> Result<bool> {
        let Some(from) = self.next.take() else {
            return Ok(false);
        };
        let page = self.reader.page(&self.table, &self.prefix, &from)?;
        self.check(&page, matches!(from, Bound::Unbounded))?;
        self.stated = page.stated;
        self.last_key = page.rows.last().map(|(key, _)| key.clone());
        if !page.is_last {
            self.next = self.last_key.clone().map(Bound::Excluded);
        }
        self.page = page.rows.into_iter();
        Ok(true)
    }

    /// Nothing else verifies a file that is read from outside.
    fn check(&self, page: &Page, is_first: bool) -> Result<()> {
        let mut previous = self.last_key.as_ref();
        for (key, _) in &page.rows {
            if previous.is_some_and(|previous| previous >= key) {
                return Err(self.reader.corrupt(format!(
                    "the rows of table {:?} are out of order",
                    self.table
                )));
            }
            previous = Some(key);
        }
        let count = page.rows.len() as u64;
        if is_first && page.is_last && self.prefix.is_empty() && count != page.stated {
            return Err(self.reader.corrupt(format!(
                "table {:?} states to hold {} rows, and {count} are there",
                self.table, page.stated
            )));
        }
        Ok(())
    }

    fn entry(&self, bytes: &[u8], stored: &Stored) -> Result<Entry<State>> {
        let damaged = || corrupt_row(&self.table, bytes);
        let (key, (expires_at, value)) =
            Key::decode(bytes).zip(stored.whole()).ok_or_else(damaged)?;
        let value = match self.kind {
            Kind::SlidingLog => decode_value(value).map(State::SlidingLog),
            Kind::FixedWindow => decode_value(value).map(State::FixedWindow),
            Kind::Other => Some(State::Other(value.to_vec())),
        };
        let value = value.ok_or_else(damaged)?;
        Ok(Entry {
            key,
            value,
            expires_at: Timestamp::from_millis(expires_at),
        })
    }
}

impl Iterator for Rows<'_> {
    type Item = Result<Entry<State>>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some((key, stored)) = self.page.next() {
                self.met += 1;
                return Some(self.entry(&key, &stored));
            }
            match self.turn() {
                Ok(true) => {}
                Ok(false) => return None,
                Err(error) => return Some(Err(error)),
            }
        }
    }
}
