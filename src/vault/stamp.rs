//! Stamps: what a file and its tables say they are.
//!
//! The redb table `ratevault` maps `"format"` to the file's format and `"table:NAME"` to the kind
//! of row in a table, such as `"sliding-log/1"`.

use std::path::Path;

use redb::{ReadTransaction, ReadableTable, TableDefinition, TableError, TableHandle};

use super::table::ROWS_PREFIX;

use crate::error::{Cause, Error, Result};

/// Key = a stamp's name, Value = what it says.
pub(super) const META: TableDefinition<'static, &str, &str> = TableDefinition::new("ratevault");

pub(super) const FORMAT_KEY: &str = "format";

/// The format of the file: of its tables, keys, rows and index entries.
pub(super) const FORMAT: &str = "1";

const TABLE_PREFIX: &str = "table:";

pub(super) fn of_table(name: &str) -> String {
    format!("{TABLE_PREFIX}{name}")
}

/// What a table is expected to be, if it is there.
#[derive(Clone, Copy, Debug)]
pub(super) struct Expected<'a> {
    pub(super) table: &'a str,
    pub(super) kind: &'static str,
    /// Whether it was there before, so that a file without it is another one, or damaged.
    pub(super) is_there: bool,
}

/// What the stamps of a file say.
pub(super) struct Stamps {
    /// Whether there is any table at all; a crash right after the file was made leaves none.
    is_blank: bool,
    format: Option<String>,
    tables: Vec<(String, String)>,
}

impl Stamps {
    pub(super) fn read(txn: &ReadTransaction) -> Result<Self, redb::Error> {
        let blank = Self {
            is_blank: txn.list_tables()?.next().is_none()
                && txn.list_multimap_tables()?.next().is_none(),
            format: None,
            tables: Vec::new(),
        };
        let meta = match txn.open_table(META) {
            Ok(meta) => meta,
            Err(TableError::Storage(error)) => return Err(error.into()),
            // Not there, or a table of that name with other types.
            Err(_) => return Ok(blank),
        };
        let format = meta.get(FORMAT_KEY)?;
        let mut tables = Vec::new();
        for found in meta.iter()? {
            let (name, kind) = found?;
            tables.push((name.value().to_owned(), kind.value().to_owned()));
        }
        Ok(Self {
            format: format.map(|format| format.value().to_owned()),
            tables,
            ..blank
        })
    }

    /// Refuses a file in which stamps and tables of rows do not go together.
    pub(super) fn check_tables(&self, txn: &ReadTransaction) -> Result<(), redb::Error> {
        let stamped = self.tables().count();
        let strangers = self.tables.len() - stamped - usize::from(self.format.is_some());
        let of_rows = |table: &redb::UntypedTableHandle| table.name().starts_with(ROWS_PREFIX);
        let tables = txn.list_tables()?.filter(of_rows).count();
        if strangers > 0 || tables != stamped {
            return Err(redb::Error::Corrupted(format!(
                "{tables} tables of rows have {stamped} stamps"
            )));
        }
        Ok(())
    }

    /// The tables: name and kind of each.
    pub(super) fn tables(&self) -> impl Iterator<Item = (&str, &str)> {
        let tables = self.tables.iter();
        tables.filter_map(|(name, kind)| Some((name.strip_prefix(TABLE_PREFIX)?, &**kind)))
    }

    /// Refuses what is not a vault of this format, or whose tables are of another kind.
    pub(super) fn check(&self, path: &Path, expected: &[Expected<'_>]) -> Result<()> {
        match self.format.as_deref() {
            Some(FORMAT) => {}
            None if self.is_blank && !expected.iter().any(|table| table.is_there) => return Ok(()),
            None => {
                return Err(Error::NotAVault {
                    path: path.to_owned(),
                    reason: "a redb file without a vault's stamp".into(),
                });
            }
            Some(found) => {
                return Err(Error::NewerFormat {
                    path: path.to_owned(),
                    found: found.to_owned(),
                    supported: FORMAT,
                });
            }
        }
        expected
            .iter()
            .try_for_each(|table| self.check_table(path, table))
    }

    fn check_table(&self, path: &Path, expected: &Expected<'_>) -> Result<()> {
        let mut tables = self.tables();
        match tables.find(|(name, _)| *name == expected.table) {
            Some((_, found)) if found != expected.kind => Err(Error::WrongKind {
                path: path.to_owned(),
                table: expected.table.to_owned(),
                found: found.to_owned(),
                expected: expected.kind,
            }),
            None if expected.is_there => Err(Error::Corrupt {
                path: path.to_owned(),
                source: Cause::new(format!("its table {:?} is gone", expected.table)),
            }),
            Some(_) | None => Ok(()),
        }
    }
}
