//! Stamps: what a file and its tables say they are.
//!
//! The redb table `ratevault` maps `"format"` to the file's format and `"table:NAME"` to the kind
//! of row in a table, such as `"sliding-log/1"`.

use redb::TableDefinition;

/// Key = a stamp's name, Value = what it says.
pub(super) const META: TableDefinition<'static, &str, &str> = TableDefinition::new("ratevault");

pub(super) const FORMAT_KEY: &str = "format";

/// The format of the file: of its tables, keys, rows and index entries.
pub(super) const FORMAT: &str = "1";

pub(super) fn of_table(name: &str) -> String {
    format!("table:{name}")
}
