//! What an operation sees of the transaction it runs in.

use std::sync::Arc;

use redb::{ReadableTable, WriteTransaction};

use super::stamp::{self, META};
use super::table::{Effects, OpenTable, Table};
use crate::clock::{Clock, Timestamp};

/// One write transaction with the tables that are open in it.
pub(super) struct Batch<'t> {
    txn: &'t WriteTransaction,
    clock: &'t dyn Clock,
    tables: Vec<OpenTable<'t>>,
    stamped: bool,
}

impl<'t> Batch<'t> {
    pub(super) fn new(txn: &'t WriteTransaction, clock: &'t dyn Clock) -> Self {
        Self {
            txn,
            clock,
            tables: Vec::new(),
            stamped: false,
        }
    }

    pub(super) const fn clock(&self) -> &'t dyn Clock {
        self.clock
    }

    pub(super) fn now(&self) -> Timestamp {
        self.clock.now()
    }

    pub(super) fn table(&mut self, table: &Arc<Table>) -> Result<&mut OpenTable<'t>, redb::Error> {
        let is_open = |open: &OpenTable<'_>| open.table.name == table.name;
        let position = match self.tables.iter().position(is_open) {
            Some(position) => position,
            None => {
                self.tables.push(OpenTable::open(self.txn, table.clone())?);
                self.tables.len() - 1
            }
        };
        self.tables
            .get_mut(position)
            .ok_or(redb::Error::TableDoesNotExist(table.name.clone()))
    }

    /// The kind that a table is stamped with, if it is.
    pub(super) fn stamp_of(&self, table: &str) -> Result<Option<String>, redb::Error> {
        let meta = self.txn.open_table(META)?;
        let kind = meta.get(&*stamp::of_table(table))?;
        Ok(kind.map(|kind| kind.value().to_owned()))
    }

    /// What is done to the open table from now on is told to `table`, its latest incarnation.
    pub(super) fn adopt(&mut self, table: &Arc<Table>) -> Result<&mut OpenTable<'t>, redb::Error> {
        let open = self.table(table)?;
        open.table = Arc::clone(table);
        Ok(open)
    }

    /// Stamps the file with its format and a table with its kind.
    pub(super) fn stamp(&mut self, table: &Table) -> Result<(), redb::Error> {
        let mut meta = self.txn.open_table(META)?;
        meta.insert(stamp::FORMAT_KEY, stamp::FORMAT)?;
        meta.insert(&*stamp::of_table(&table.name), table.kind)?;
        self.stamped = true;
        Ok(())
    }

    /// Closes the tables: whether anything was changed, and what was done to each.
    pub(super) fn finish(self) -> (bool, Vec<(Arc<Table>, Effects)>) {
        let tables = self.tables.into_iter();
        let effects: Vec<_> = tables.map(|open| (open.table, open.effects)).collect();
        let changed = self.stamped || effects.iter().any(|(_, effects)| effects.changed);
        (changed, effects)
    }
}
