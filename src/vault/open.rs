//! Opening a database: look first, change nothing that is not ours, wait for the lock.

use std::fs::File;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use redb::backends::FileBackend;
use redb::{
    ConcurrencyMode, Database, DatabaseError, ReadOnlyDatabase, ReadTransaction, ReadableDatabase,
    StorageError, TableError,
};

use super::rehearsal::Rehearsal;
use super::settings::FileSettings;
use super::stamp::{self, META};
use super::storage::{FileLocks, NoLocks, PrivateBackend, Storage};
use crate::error::{Cause, Error, Result};

/// How long to wait before a lock is tried again.
const LOCK_POLL: Duration = Duration::from_millis(10);

/// Where a vault's bytes are.
#[derive(Debug)]
pub(super) enum Source {
    /// A file, and what tells it from another one that takes its path later.
    File {
        path: PathBuf,
        identity: Arc<same_file::Handle>,
    },
    Private(Arc<dyn Storage>),
}

/// What a table is expected to be, if it is there.
#[derive(Clone, Copy, Debug)]
pub(super) struct Expected<'a> {
    pub(super) table: &'a str,
    pub(super) kind: &'static str,
}

impl Source {
    /// The file at `path`, created with mode 0600 if it is not there.
    pub(super) fn file(path: &Path) -> Result<Self> {
        // The working directory may be another one when the file has to be opened again.
        let path = std::path::absolute(path).map_err(|error| open_error(path, error))?;
        let fail = |error| open_error(&path, error);
        match path.metadata() {
            Ok(metadata) if metadata.is_file() => {}
            Ok(_) => return Err(fail(io::Error::other("it is not a regular file"))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => create(&path)?,
            Err(error) => return Err(fail(error)),
        }
        let identity = same_file::Handle::from_path(&path).map_err(fail)?;
        Ok(Self::File {
            path,
            identity: Arc::new(identity),
        })
    }

    /// How errors name it.
    pub(super) fn path(&self) -> PathBuf {
        match self {
            Self::File { path, .. } => path.clone(),
            Self::Private(_) => PathBuf::from("(private storage)"),
        }
    }

    /// Opens the database for writing, after a look at what is there. Blocks until the lock is
    /// free, at most for the lock timeout.
    pub(super) fn open(
        &self,
        settings: &FileSettings,
        expected: &[Expected<'_>],
    ) -> Result<Database> {
        let started = Instant::now();
        loop {
            match self.try_open(settings, expected)? {
                Some(database) => return Ok(database),
                None if started.elapsed() >= settings.lock_timeout => {
                    return Err(Error::Locked {
                        path: self.path(),
                        waited: settings.lock_timeout,
                    });
                }
                None => thread::sleep(LOCK_POLL.min(settings.lock_timeout)),
            }
        }
    }

    /// Opens a database again that failed, without waiting for a lock.
    pub(super) fn reopen(&self, settings: &FileSettings) -> Result<Database> {
        let locked = || Error::Locked {
            path: self.path(),
            waited: Duration::ZERO,
        };
        self.try_open(settings, &[])?.ok_or_else(locked)
    }

    /// `None`: somebody else has it open.
    fn try_open(
        &self,
        settings: &FileSettings,
        expected: &[Expected<'_>],
    ) -> Result<Option<Database>> {
        if !self.is_empty()? && !self.look(settings, expected)? {
            return Ok(None);
        }
        match self.attempt(|| self.open_for_writing(settings))? {
            Looked::Open(database) => Ok(Some(database)),
            Looked::Unclean | Looked::Busy => Ok(None),
        }
    }

    /// Refuses what is not a vault of this format, or whose tables are of another kind, without
    /// writing to it. `false`: somebody else has it open.
    fn look(&self, settings: &FileSettings, expected: &[Expected<'_>]) -> Result<bool> {
        match self.attempt(|| self.open_read_only(settings))? {
            Looked::Open(database) => self.inspect(&database, expected).map(|()| true),
            Looked::Busy => Ok(false),
            // A crash left it, or somebody is just opening it.
            Looked::Unclean => match self.attempt(|| self.rehearse(settings))? {
                Looked::Open(database) => self.inspect(&database, expected).map(|()| true),
                Looked::Unclean | Looked::Busy => Ok(false),
            },
        }
    }

    fn is_empty(&self) -> Result<bool> {
        match self {
            Self::File { path, .. } => {
                let metadata = path.metadata();
                let length = metadata.map(|metadata| metadata.len());
                length
                    .map(|length| length == 0)
                    .map_err(|error| open_error(path, error))
            }
            Self::Private(storage) => storage
                .is_empty()
                .map_err(|error| open_error(&self.path(), error)),
        }
    }

    fn open_for_writing(&self, settings: &FileSettings) -> Result<Database, DatabaseError> {
        let mut builder = builder(settings);
        builder.set_check_integrity_on_open(true);
        match self {
            Self::File { path, identity } => {
                let file = writable(path)?;
                if same_file::Handle::from_path(path)? != **identity {
                    return Err(io::Error::other("another file has taken its place").into());
                }
                builder.create_with_backend(file)
            }
            Self::Private(storage) => builder.create_with_backend(PrivateBackend(storage.clone())),
        }
    }

    /// Opens the database for writing, but keeps what that writes in memory.
    fn rehearse(&self, settings: &FileSettings) -> Result<Database, DatabaseError> {
        match self {
            Self::File { path, .. } => {
                builder(settings).create_with_backend(Rehearsal::new(writable(path)?))
            }
            Self::Private(storage) => {
                let storage = PrivateBackend(storage.clone());
                builder(settings).create_with_backend(Rehearsal::new(storage))
            }
        }
    }

    fn open_read_only(&self, settings: &FileSettings) -> Result<ReadOnlyDatabase, DatabaseError> {
        match self {
            Self::File { path, .. } => {
                let file = File::options().read(true).open(path)?;
                builder(settings).open_read_only_with_backend(FileLocks::new(file)?)
            }
            Self::Private(storage) => {
                builder(settings).open_read_only_with_backend(PrivateBackend(storage.clone()))
            }
        }
    }

    fn inspect(&self, database: &impl ReadableDatabase, expected: &[Expected<'_>]) -> Result<()> {
        let looked = catch_unwind(AssertUnwindSafe(|| {
            let txn = database.begin_read().map_err(redb::Error::from)?;
            Stamps::read(&txn)
        }));
        let stamps = match looked {
            Ok(Ok(stamps)) => stamps,
            Ok(Err(error)) => return Err(self.corrupt(error)),
            Err(_) => return Err(self.corrupt("the storage engine gave up reading it")),
        };
        stamps.check(&self.path(), expected)
    }

    /// Runs one way of opening and sorts what can come of it.
    fn attempt<D>(&self, open: impl FnOnce() -> Result<D, DatabaseError>) -> Result<Looked<D>> {
        let path = self.path();
        match catch_unwind(AssertUnwindSafe(open)) {
            Ok(Ok(database)) => Ok(Looked::Open(database)),
            Ok(Err(error)) => match error {
                DatabaseError::DatabaseAlreadyOpen | DatabaseError::LockProtocolMismatch => {
                    Ok(Looked::Busy)
                }
                DatabaseError::RepairAborted => Ok(Looked::Unclean),
                DatabaseError::UpgradeRequired(version) => Err(Error::NotAVault {
                    path,
                    reason: format!("a redb file of the old format {version}"),
                }),
                DatabaseError::Storage(StorageError::Unsupported) => {
                    Err(Error::CannotLock { path })
                }
                DatabaseError::Storage(StorageError::Io(error)) => Err(io_error(path, error)),
                error => Err(self.corrupt(error)),
            },
            Err(_) => Err(self.corrupt("the storage engine gave up opening it")),
        }
    }

    fn corrupt(&self, cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
        Error::Corrupt {
            path: self.path(),
            source: Cause::new(cause),
        }
    }
}

enum Looked<D> {
    Open(D),
    Unclean,
    Busy,
}

fn writable(path: &Path) -> Result<FileLocks<FileBackend>, DatabaseError> {
    FileLocks::new(File::options().read(true).write(true).open(path)?)
}

fn builder(settings: &FileSettings) -> redb::Builder {
    let mut builder = Database::builder();
    builder
        .set_cache_size(settings.cache_bytes)
        .set_concurrency_mode(if settings.exclusive {
            ConcurrencyMode::ExclusiveWriter
        } else {
            ConcurrencyMode::SingleWriter
        });
    builder
}

/// What the stamps of a file say.
struct Stamps {
    /// Whether there is any table at all; a crash right after the file was made leaves none.
    is_blank: bool,
    format: Option<String>,
    tables: Vec<(String, String)>,
}

impl Stamps {
    fn read(txn: &ReadTransaction) -> Result<Self, redb::Error> {
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
        let format = meta.get(stamp::FORMAT_KEY)?;
        let mut tables = Vec::new();
        for found in redb::ReadableTable::iter(&meta)? {
            let (name, kind) = found?;
            tables.push((name.value().to_owned(), kind.value().to_owned()));
        }
        Ok(Self {
            format: format.map(|format| format.value().to_owned()),
            tables,
            ..blank
        })
    }

    fn check(&self, path: &Path, expected: &[Expected<'_>]) -> Result<()> {
        match self.format.as_deref() {
            Some(stamp::FORMAT) => {}
            None if self.is_blank => return Ok(()),
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
                    supported: stamp::FORMAT,
                });
            }
        }
        for Expected { table, kind } in expected {
            let name = stamp::of_table(table);
            let stamped = self.tables.iter().find(|(stamped, _)| *stamped == name);
            if let Some((_, found)) = stamped
                && found != kind
            {
                return Err(Error::WrongKind {
                    path: path.to_owned(),
                    table: (*table).to_owned(),
                    found: found.clone(),
                    expected: kind,
                });
            }
        }
        Ok(())
    }
}

/// Creates a vault file that is whole from the first moment on.
///
/// Crash: redb's own initialisation takes several writes, and a file that a crash leaves between
/// them is no database. So it happens in a temporary file of mode 0600 beside `path`, which then
/// takes its name, unless another process was faster.
fn create(path: &Path) -> Result<()> {
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    if !directory.is_dir() {
        return Err(Error::NoDirectory {
            path: path.to_owned(),
            directory: directory.to_owned(),
        });
    }
    let fail = |error| open_error(path, error);
    let file = tempfile::Builder::new()
        .prefix(".ratevault-")
        .tempfile_in(directory)
        .map_err(fail)?;
    let database = Database::create(file.path()).and_then(Database::close);
    database.map_err(|error| match error {
        DatabaseError::Storage(StorageError::Io(error)) => open_error(path, error),
        error => open_error(path, io::Error::other(error)),
    })?;
    match file.persist_noclobber(path) {
        Ok(_) => sync_directory(directory).map_err(fail),
        Err(error) if error.error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(open_error(path, error.error)),
    }
}

/// Makes the file's name survive a power cut; redb syncs the file alone.
fn sync_directory(directory: &Path) -> io::Result<()> {
    if cfg!(unix) {
        File::open(directory)?.sync_all()?;
    }
    Ok(())
}

fn io_error(path: PathBuf, error: io::Error) -> Error {
    match error.kind() {
        _ if error.get_ref().is_some_and(|inner| inner.is::<NoLocks>()) => {
            Error::CannotLock { path }
        }
        // What redb says of a file without its magic number, or shorter than its header.
        io::ErrorKind::InvalidData => Error::NotAVault {
            path,
            reason: error.to_string(),
        },
        io::ErrorKind::UnexpectedEof => Error::Corrupt {
            path,
            source: Cause::new("it ends before its content does"),
        },
        _ => open_error(&path, error),
    }
}

fn open_error(path: &Path, source: io::Error) -> Error {
    Error::Open {
        path: path.to_owned(),
        source,
    }
}
