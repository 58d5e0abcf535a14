//! Settings of a file and of a table: what was asked for, and what is in force.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::durability::Durability;
use crate::clock::{Clock, SystemClock};
use crate::error::{Error, Result};

/// What a builder was told about the file; `None` takes what is there.
#[derive(Debug, Default)]
pub(super) struct Wanted {
    pub(super) exclusive: Option<bool>,
    pub(super) cache_bytes: Option<usize>,
    pub(super) lock_timeout: Option<Duration>,
    pub(super) background_sweep: Option<bool>,
    pub(super) clock: Option<Arc<dyn Clock>>,
}

/// What is in force for an open file.
#[derive(Clone, Debug)]
pub(super) struct FileSettings {
    pub(super) exclusive: bool,
    pub(super) cache_bytes: usize,
    pub(super) lock_timeout: Duration,
    pub(super) background_sweep: bool,
    pub(super) clock: Arc<dyn Clock>,
}

impl FileSettings {
    pub(super) fn new(wanted: &Wanted) -> Self {
        Self {
            exclusive: wanted.exclusive.unwrap_or(false),
            cache_bytes: wanted.cache_bytes.unwrap_or(16 << 20),
            lock_timeout: wanted.lock_timeout.unwrap_or(Duration::from_secs(5)),
            background_sweep: wanted.background_sweep.unwrap_or(true),
            clock: wanted
                .clock
                .clone()
                .unwrap_or_else(|| Arc::new(SystemClock)),
        }
    }

    /// An error if `wanted` sets anything to another value than is in force.
    pub(super) fn check(&self, wanted: &Wanted, path: &Path) -> Result<()> {
        agree(path, "exclusive", self.exclusive, wanted.exclusive)?;
        agree(path, "cache_bytes", self.cache_bytes, wanted.cache_bytes)?;
        agree(path, "lock_timeout", self.lock_timeout, wanted.lock_timeout)?;
        agree(
            path,
            "background_sweep",
            self.background_sweep,
            wanted.background_sweep,
        )?;
        match &wanted.clock {
            Some(clock) if !Arc::ptr_eq(clock, &self.clock) => Err(Error::Conflict {
                path: path.to_owned(),
                setting: "clock",
                open: format!("{:?}", self.clock),
                requested: format!("another clock, {clock:?}"),
            }),
            _ => Ok(()),
        }
    }
}

/// What a builder was told about the table; `None` takes what is there.
#[derive(Debug, Default)]
pub(super) struct WantedOfTable {
    pub(super) max_keys: Option<u64>,
    pub(super) durability: Option<Durability>,
    pub(super) buffer_bytes: Option<usize>,
}

/// What is in force for a table.
#[derive(Clone, Copy, Debug)]
pub(super) struct TableSettings {
    pub(super) max_keys: u64,
    pub(super) durability: Durability,
    pub(super) buffer_bytes: usize,
}

impl TableSettings {
    pub(super) fn new(wanted: &WantedOfTable) -> Self {
        Self {
            max_keys: wanted.max_keys.unwrap_or(1_000_000),
            durability: wanted.durability.unwrap_or_default(),
            buffer_bytes: wanted.buffer_bytes.unwrap_or(256 << 20),
        }
    }

    /// An error if `wanted` sets anything to another value than is in force.
    pub(super) fn check(&self, wanted: &WantedOfTable, path: &Path) -> Result<()> {
        agree(path, "max_keys", self.max_keys, wanted.max_keys)?;
        agree(path, "durability", self.durability, wanted.durability)?;
        agree(path, "buffer_bytes", self.buffer_bytes, wanted.buffer_bytes)
    }
}

/// An error if `wanted` is set and differs from what is `open`.
pub(super) fn agree<T: PartialEq + std::fmt::Debug>(
    path: &Path,
    setting: &'static str,
    open: T,
    wanted: Option<T>,
) -> Result<()> {
    match wanted {
        Some(wanted) if wanted != open => Err(Error::Conflict {
            path: path.to_owned(),
            setting,
            open: format!("{open:?}"),
            requested: format!("{wanted:?}"),
        }),
        _ => Ok(()),
    }
}
