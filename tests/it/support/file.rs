//! A closed vault's file as it really is, read with redb alone and by the documented formats.

use std::collections::BTreeMap;
use std::path::Path;

use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};

/// Key = an encoded key, Value = an encoded row.
pub fn rows(name: &str) -> TableDefinition<'_, &'static [u8], &'static [u8]> {
    TableDefinition::new(name)
}

/// Key = class, deadline and key, no value.
fn deadlines(name: &str) -> TableDefinition<'_, &'static [u8], ()> {
    TableDefinition::new(name)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub in_shared_class: bool,
    pub expires_at: u64,
    pub ttl: u64,
    pub filed_at: u64,
}

/// What a table holds.
#[derive(Debug, Default)]
pub struct Contents {
    pub rows: BTreeMap<Vec<u8>, Header>,
    /// (class, `filed_at`, key), in order.
    pub deadlines: Vec<(u64, u64, Vec<u8>)>,
}

impl Contents {
    pub fn read(path: &Path, table: &str) -> Self {
        let database = Database::open(path).unwrap();
        let txn = database.begin_read().unwrap();
        let mut contents = Self::default();
        let found = txn.open_table(rows(&format!("rows:{table}"))).unwrap();
        for row in found.iter().unwrap() {
            let (key, row) = row.unwrap();
            contents
                .rows
                .insert(key.value().to_vec(), header(row.value()));
        }
        let found = txn
            .open_table(deadlines(&format!("deadlines:{table}")))
            .unwrap();
        for entry in found.iter().unwrap() {
            let entry = entry.unwrap().0;
            let (class, rest) = entry.value().split_first_chunk().unwrap();
            let (filed_at, key) = rest.split_first_chunk().unwrap();
            let entry = (
                u64::from_be_bytes(*class),
                u64::from_be_bytes(*filed_at),
                key.to_vec(),
            );
            contents.deadlines.push(entry);
        }
        contents
    }

    /// Every row has exactly one entry, under the instant it states, not after its deadline.
    pub fn check_invariant(&self) {
        let mut expected: Vec<_> = self
            .rows
            .iter()
            .map(|(key, header)| {
                assert!(header.filed_at <= header.expires_at, "{header:?}");
                let class = if header.in_shared_class {
                    u64::MAX
                } else {
                    header.ttl
                };
                (class, header.filed_at, key.clone())
            })
            .collect();
        expected.sort();
        assert_eq!(expected, self.deadlines);
    }
}

fn header(row: &[u8]) -> Header {
    assert_eq!(row[0], 1, "the format");
    let number = |at: usize| u64::from_le_bytes(row[at..at + 8].try_into().unwrap());
    Header {
        in_shared_class: row[1] == 1,
        expires_at: number(2),
        ttl: number(10),
        filed_at: number(18),
    }
}

/// Changes one byte of a row's value, behind the vault's back.
pub fn damage_row(path: &Path, table: &str, key: &[u8]) {
    damage_rows(path, table, &[key]);
}

/// Changes one byte of each row's value.
pub fn damage_rows(path: &Path, table: &str, keys: &[&[u8]]) {
    let database = Database::open(path).unwrap();
    let txn = database.begin_write().unwrap();
    {
        let name = format!("rows:{table}");
        let mut rows = txn.open_table(rows(&name)).unwrap();
        for key in keys {
            let mut row = rows.get(key).unwrap().unwrap().value().to_vec();
            let last_of_value = row.len() - 5;
            row[last_of_value] ^= 1;
            rows.insert(key, &*row).unwrap();
        }
    }
    txn.commit().unwrap();
    database.close().unwrap();
}
