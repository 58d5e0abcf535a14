//! The one error type. A refused check is a [`Decision`](crate::Decision), never an error.
//!
//! Lies below every other module and uses none of them.

use std::fmt::{self, Write};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, to which file, table or value, and what to do about it.
///
/// Every message is one line. Errors of the storage engine stay inside an opaque [`Cause`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file could not be opened or created.
    #[error(
        "cannot open the vault file {path:?}: {source}; check the path and its permissions, or name another file with `path(..)` or $RATEVAULT_DB"
    )]
    Open {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },

    /// The file's directory does not exist; directories are never created.
    #[error(
        "cannot open the vault file {path:?}: the directory {directory:?} does not exist; create it, or name another file with `path(..)` or $RATEVAULT_DB"
    )]
    NoDirectory {
        /// The file.
        path: PathBuf,
        /// The directory that is missing.
        directory: PathBuf,
    },

    /// Another process has the file open and kept it for the whole lock timeout.
    #[error(
        "the vault file {path:?} is open in another process and was not released within {waited:?}; stop that process, or give this one a file of its own"
    )]
    Locked {
        /// The file.
        path: PathBuf,
        /// How long the lock was waited for.
        waited: Duration,
    },

    /// The file system, or the platform, offers no file locks, so two processes could count apart.
    #[error(
        "the file system of {path:?} cannot lock the file, so a second process could not be kept out; put the vault on a local file system (on a platform without byte-range locks use `exclusive()`)"
    )]
    CannotLock {
        /// The file.
        path: PathBuf,
    },

    /// The file was not closed cleanly, and nobody has it open: it can be read once it is recovered.
    #[error(
        "the vault file {path:?} was not closed cleanly and nobody has it open; start its program again, or recover it with `repair(true)` (dump: `--repair`)"
    )]
    NotClosedCleanly {
        /// The file.
        path: PathBuf,
    },

    /// The owner of the file has opened it for itself alone.
    #[error(
        "the vault file {path:?} is open in exclusive mode, which keeps readers out; look into it when its program has ended, or open it there without `exclusive()`"
    )]
    ReadersKeptOut {
        /// The file.
        path: PathBuf,
    },

    /// The file has no such table.
    #[error("{path:?} has no table {table:?}; it has {}", list(.tables))]
    NoSuchTable {
        /// The file.
        path: PathBuf,
        /// The table that was asked for.
        table: String,
        /// The tables that are there.
        tables: Vec<String>,
    },

    /// The file holds something else. Not one byte of it was changed.
    #[error("{path:?} is not a vault ({reason}); it was left as it is: name another file")]
    NotAVault {
        /// The file.
        path: PathBuf,
        /// What was found.
        reason: String,
    },

    /// The file was written by a newer version of this crate. Not one byte of it was changed.
    #[error(
        "the vault file {path:?} has format {found:?}, this version reads {supported:?}; it was left as it is: use the newer version"
    )]
    NewerFormat {
        /// The file.
        path: PathBuf,
        /// The format the file states.
        found: String,
        /// The format this version reads and writes.
        supported: &'static str,
    },

    /// The table holds another kind of row. Not one byte of it was changed.
    #[error(
        "table {table:?} in {path:?} holds {found:?} rows, not {expected:?}; it was left as it is: name another table"
    )]
    WrongKind {
        /// The file.
        path: PathBuf,
        /// The table.
        table: String,
        /// The kind of row the table is stamped with.
        found: String,
        /// The kind of row that was asked for.
        expected: &'static str,
    },

    /// The file is damaged beyond what crash recovery mends.
    #[error(
        "the vault file {path:?} is damaged: {source}; nothing was deleted: restore a backup, or move the file away to start anew"
    )]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What the storage engine found.
        source: Cause,
    },

    /// One row fails its checksum or does not decode. Other rows are unaffected.
    #[error(
        "the row of {client:?} at {endpoint:?} in table {table:?} is damaged; `remove` or `reset` forgets it, other rows are unaffected"
    )]
    CorruptRow {
        /// The table.
        table: String,
        /// The endpoint of the row's key.
        endpoint: String,
        /// The client of the row's key: its text, or as [`Client`](crate::Client) is displayed; all
        /// of the key if that does not decode.
        client: String,
    },

    /// The file or table is open in this process with another setting.
    #[error(
        "{path:?} is already open in this process with {setting} = {open}, not {requested}; leave it unset to take what is there"
    )]
    Conflict {
        /// The file.
        path: PathBuf,
        /// The setting.
        setting: &'static str,
        /// Its value in force.
        open: String,
        /// The value that was asked for.
        requested: String,
    },

    /// A setting has a value that it cannot have.
    #[error("{setting} cannot be {value}: {reason}")]
    InvalidSetting {
        /// The setting.
        setting: &'static str,
        /// The value that was asked for.
        value: String,
        /// What it must be instead.
        reason: &'static str,
    },

    /// The endpoint's name is longer than a key allows.
    #[error(
        "the endpoint's name has {length} bytes, more than {limit}; name the endpoint, do not pass the request's path"
    )]
    EndpointTooLong {
        /// Its length in bytes.
        length: usize,
        /// The longest allowed, in bytes.
        limit: usize,
    },

    /// The text or the numbers do not make a quota.
    #[error("invalid quota {quota:?}: {part:?} {reason}")]
    InvalidQuota {
        /// What was given.
        quota: String,
        /// The part of it that is wrong.
        part: String,
        /// What is wrong with that part.
        reason: &'static str,
    },

    /// The cost is 0, or larger than a limit, so that the check could never be admitted.
    #[error("a check of cost {cost} can never fit: the cost must be between 1 and {limit}")]
    InvalidCost {
        /// The cost that was asked for.
        cost: u32,
        /// The smallest limit it has to fit into.
        limit: u32,
    },

    /// The value could not be encoded, or is larger than a row may be. Nothing was written.
    #[error("the value for row {key} of table {table:?} cannot be stored: {source}")]
    Encode {
        /// The table.
        table: String,
        /// The row's key, control characters escaped.
        key: String,
        /// What the encoder said.
        source: Cause,
    },

    /// More operations wait than the queue holds. This one was not applied.
    #[error(
        "{limit} operations already wait for {path:?}; this one was not applied: retry later, or shed load"
    )]
    Overloaded {
        /// The file.
        path: PathBuf,
        /// How many operations may wait.
        limit: usize,
    },

    /// The storage failed, or did not answer in time. Service resumes by itself when it is well.
    #[error("the vault file {path:?} is unavailable ({applied}): {source}")]
    Unavailable {
        /// The file.
        path: PathBuf,
        /// Whether the operation may have been applied.
        applied: Applied,
        /// What failed.
        source: Cause,
    },

    /// A limiter that is not one of this crate failed, or any did not answer in time.
    #[error("the limiter failed: {source}")]
    Limiter {
        /// What it said.
        source: Cause,
    },

    /// The vault was closed.
    #[error("the vault file {path:?} was closed in this process; open it again to go on")]
    Closed {
        /// The file.
        path: PathBuf,
    },

    /// A vault was asked to wait from inside an `update` closure.
    #[error(
        "a vault was asked to wait from inside an `update` closure, which could wait for itself; do it before or after"
    )]
    InsideUpdate,
}

impl Error {
    /// This error of an operation in several transactions. If one was committed before, it is no
    /// longer true that nothing was applied.
    pub(crate) fn in_part(self, has_begun: bool) -> Self {
        match self {
            Self::Unavailable { path, source, .. } if has_begun => Self::Unavailable {
                path,
                applied: Applied::Unknown,
                source,
            },
            Self::Overloaded { ref path, .. } if has_begun => Self::Unavailable {
                path: path.clone(),
                applied: Applied::Unknown,
                source: Cause::new(self),
            },
            other => other,
        }
    }
}

fn list(names: &[String]) -> String {
    if names.is_empty() {
        return "none".into();
    }
    let quoted: Vec<_> = names.iter().map(|name| format!("{name:?}")).collect();
    quoted.join(", ")
}

/// What is known of an operation that ended with [`Error::Unavailable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Applied {
    /// It was not applied.
    No,
    /// It may have been applied, or a part of it.
    Unknown,
}

impl fmt::Display for Applied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::No => "the operation was not applied",
            Self::Unknown => "outcome unknown: the operation may have been applied",
        })
    }
}

/// An error of a layer below, kept for its message.
#[derive(Clone)]
pub struct Cause(Arc<dyn std::error::Error + Send + Sync>);

impl Cause {
    pub(crate) fn new(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self(Arc::from(error.into()))
    }
}

impl fmt::Debug for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// In one line: control characters are escaped.
impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.to_string().chars().try_for_each(|character| {
            if character.is_control() {
                write!(f, "{}", character.escape_default())
            } else {
                f.write_char(character)
            }
        })
    }
}

impl std::error::Error for Cause {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}
