//! Reading a file from outside: read-only, in short transactions, also while its owner writes.

use std::ops::Bound;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::Duration;

use redb::{ReadOnlyDatabase, ReadTransaction, ReadableDatabase, ReadableTableMetadata};

use super::open::{Patience, Source, View};
use super::settings::{FileSettings, Wanted};
use super::stamp::Stamps;
use super::table::{self, Stored, rows_name};
use crate::error::{Cause, Error, Result};

/// How much one transaction reads: this many rows, or this many bytes of them.
const PAGE_ROWS: usize = 10_000;
const PAGE_BYTES: usize = 8 << 20;

/// Little, as nothing is read twice.
const CACHE_BYTES: usize = 4 << 20;

/// A file that is open for reading only.
pub(crate) struct Reader {
    source: Source,
    database: ReadOnlyDatabase,
}

/// A table of a file, as its stamp and its length say.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TableInfo {
    /// Its name.
    pub name: String,
    /// What kind of row it holds, such as `"sliding-log/1"`.
    pub kind: String,
    /// How many rows it holds, those included that have expired.
    pub rows: u64,
}

/// Rows that one transaction found, in the order of their keys.
pub(crate) struct Page {
    pub(crate) rows: Vec<(Vec<u8>, Stored)>,
    /// How many rows the table states to hold.
    pub(crate) stated: u64,
    /// Whether nothing comes after them.
    pub(crate) is_last: bool,
}

impl Reader {
    /// Opens what is there, and waits up to `patience` for one who keeps readers out.
    pub(crate) fn open(path: &Path, patience: Duration, repair: bool) -> Result<Self> {
        let source = Source::existing(path)?;
        let settings = FileSettings::new(&Wanted {
            lock_timeout: Some(patience),
            cache_bytes: Some(CACHE_BYTES),
            ..Wanted::default()
        });
        let mut waiting = Patience::new(patience);
        let mut repaired = false;
        loop {
            let out_of_patience = waiting.is_over();
            match source.view(&settings)? {
                View::Open(database) => return Ok(Self { source, database }),
                View::Busy if out_of_patience => {
                    return Err(Error::Locked {
                        path: source.path(),
                        waited: patience,
                    });
                }
                View::Unclean if repair && !repaired => {
                    source.repair(&settings)?;
                    repaired = true;
                }
                View::Unclean if out_of_patience => {
                    return Err(Error::NotClosedCleanly {
                        path: source.path(),
                    });
                }
                // Its owner may be just opening it.
                View::Busy | View::Unclean => waiting.pause(),
            }
        }
    }

    pub(crate) fn path(&self) -> std::path::PathBuf {
        self.source.path()
    }

    pub(crate) fn tables(&self) -> Result<Vec<TableInfo>> {
        self.read(|txn| {
            let stamps = Stamps::read(txn)?;
            let table = |(name, kind): (&str, &str)| {
                let rows = match txn.open_table(table::rows(&rows_name(name))) {
                    Ok(rows) => rows.len()?,
                    // Stamped and created in one transaction: only damage parts the two.
                    Err(error) => return Err(error.into()),
                };
                Ok(TableInfo {
                    name: name.to_owned(),
                    kind: kind.to_owned(),
                    rows,
                })
            };
            stamps.tables().map(table).collect()
        })
    }

    /// The next rows of a table whose keys start with `prefix`.
    pub(crate) fn page(&self, name: &str, prefix: &[u8], from: &Bound<Vec<u8>>) -> Result<Page> {
        self.read(|txn| {
            let rows = txn.open_table(table::rows(&rows_name(name)))?;
            let from = match from {
                Bound::Unbounded => Bound::Included(prefix),
                bound => bound.as_ref().map(Vec::as_slice),
            };
            let mut page = Page {
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
                if page.rows.len() >= PAGE_ROWS || bytes >= PAGE_BYTES {
                    page.is_last = false;
                    break;
                }
                bytes += key.value().len() + row.value().len();
                let stored = Stored::read(key.value(), Some(row.value()));
                page.rows.push((key.value().to_vec(), stored));
            }
            Ok(page)
        })
    }

    /// Runs `read` in one transaction. redb does not verify a file that it opens read-only, so it
    /// may come across anything.
    fn read<T>(&self, read: impl FnOnce(&ReadTransaction) -> Result<T, redb::Error>) -> Result<T> {
        let run = || read(&self.database.begin_read().map_err(redb::Error::from)?);
        match catch_unwind(AssertUnwindSafe(run)) {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) => Err(self.corrupt(error)),
            Err(_) => Err(self.corrupt("the storage engine gave up reading it")),
        }
    }

    pub(crate) fn corrupt(
        &self,
        cause: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Error {
        Error::Corrupt {
            path: self.path(),
            source: Cause::new(cause),
        }
    }
}

impl std::fmt::Debug for Reader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reader")
            .field("source", &self.source)
            .finish_non_exhaustive()
    }
}
