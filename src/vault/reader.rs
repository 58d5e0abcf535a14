//! Reading a file from outside: read-only, in short transactions, also while its owner writes.

use std::ops::Bound;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::Duration;

use redb::{ReadOnlyDatabase, ReadTransaction, ReadableDatabase, ReadableTableMetadata};

use super::open::{Patience, Source, View, io_error};
use super::scan::Page;
use super::settings::{FileSettings, Wanted};
use super::stamp::Stamps;
use super::table::{self, rows_name};
use crate::error::{Cause, Error, Result};

/// How many rows one transaction reads.
const PAGE_ROWS: usize = 10_000;

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
        loop {
            match source.view(&settings)? {
                View::Open(database) => return Ok(Self { source, database }),
                View::Busy if waiting.is_over() => {
                    return Err(Error::ReadersKeptOut {
                        path: source.path(),
                    });
                }
                View::Unclean if waiting.is_over() && !repair => {
                    return Err(Error::NotClosedCleanly {
                        path: source.path(),
                    });
                }
                View::Unclean if waiting.is_over() => {
                    source.repair(&settings)?;
                    return match source.view(&settings)? {
                        View::Open(database) => Ok(Self { source, database }),
                        View::Busy | View::Unclean => Err(Error::Locked {
                            path: source.path(),
                            waited: patience,
                        }),
                    };
                }
                // Its owner may be just opening it, so it is not for us to repair.
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
            stamps.check_tables(txn)?;
            let table = |(name, kind): (&str, &str)| {
                let rows = txn.open_table(table::rows(&rows_name(name)))?;
                Ok(TableInfo {
                    name: name.to_owned(),
                    kind: kind.to_owned(),
                    rows: rows.len()?,
                })
            };
            stamps.tables().map(table).collect()
        })
    }

    /// The next rows of a table whose keys start with `prefix`.
    pub(crate) fn page(&self, name: &str, prefix: &[u8], from: &Bound<Vec<u8>>) -> Result<Page> {
        self.read(|txn| Page::read(txn, name, prefix, from, PAGE_ROWS))
    }

    /// Runs `read` in one transaction. redb does not verify a file that it opens read-only, so it
    /// may come across anything.
    fn read<T>(&self, read: impl FnOnce(&ReadTransaction) -> Result<T, redb::Error>) -> Result<T> {
        let run = || read(&self.database.begin_read().map_err(redb::Error::from)?);
        match catch_unwind(AssertUnwindSafe(run)) {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(redb::Error::Io(error))) => Err(io_error(self.path(), error)),
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
