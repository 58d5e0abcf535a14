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
    ConcurrencyMode, Database, DatabaseError, ReadOnlyDatabase, ReadableDatabase, StorageError,
};

use super::create::{create, directory_of, sync_directory};
use super::place;
use super::rehearsal::Rehearsal;
use super::settings::FileSettings;
use super::stamp::{Expected, Stamps};
use super::storage::{FileLocks, NoLocks, PrivateBackend, Storage};
use crate::error::{Cause, Error, Result};

/// A wait for a lock of another process. Locks of our own are the registry's matter.
pub(super) struct Patience {
    started: Instant,
    timeout: Duration,
    pause: Duration,
}

impl Patience {
    pub(super) fn new(timeout: Duration) -> Self {
        Self {
            started: Instant::now(),
            timeout,
            pause: Duration::from_millis(10),
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.started.elapsed() >= self.timeout
    }

    /// Waits before the next try; longer each time, as a try costs a look at the file.
    pub(super) fn pause(&mut self) {
        thread::sleep(self.pause);
        self.pause = Duration::from_millis(50).min(self.pause * 2);
    }
}

/// Where a vault's bytes are.
#[derive(Clone, Debug)]
pub(super) enum Source {
    /// A file, and what tells it from another one that takes its path later.
    File {
        path: PathBuf,
        identity: Arc<same_file::Handle>,
    },
    Private(Arc<dyn Storage>),
}

impl Source {
    /// The file at `path`, created with mode 0600 if it is not there.
    pub(super) fn file(path: &Path) -> Result<Self> {
        let path = absolute(path)?;
        match path.metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => create(&path)?,
            Ok(_) | Err(_) => {}
        }
        let source = Self::existing(&path)?;
        // Whoever made it may not have come to this.
        if let Err(error) = sync_directory(directory_of(&path)) {
            tracing::warn!(?path, %error, "the directory of the vault file cannot be synced");
        }
        Ok(source)
    }

    /// The file at `path`, which is there.
    pub(super) fn existing(path: &Path) -> Result<Self> {
        let path = absolute(path)?;
        let fail = |error| open_error(&path, error);
        if !path.metadata().map_err(fail)?.is_file() {
            return Err(fail(io::Error::other("it is not a regular file")));
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

    /// An error if it is a file that is no longer at its path.
    pub(super) fn check_place(&self) -> io::Result<()> {
        match self {
            Self::File { path, identity } => place::check(path, identity),
            Self::Private(_) => Ok(()),
        }
    }

    /// Opens the database for writing, after a look at what is there. Blocks until the lock is
    /// free, at most for the lock timeout.
    pub(super) fn open(
        &self,
        settings: &FileSettings,
        expected: &[Expected<'_>],
    ) -> Result<Database> {
        let mut patience = Patience::new(settings.lock_timeout);
        loop {
            match self.try_open(settings, expected)? {
                Some(database) => return Ok(database),
                None if patience.is_over() => {
                    return Err(Error::Locked {
                        path: self.path(),
                        waited: settings.lock_timeout,
                    });
                }
                None => patience.pause(),
            }
        }
    }

    /// Opens a database again that failed, without waiting for a lock. It has to be there.
    pub(super) fn reopen(
        &self,
        settings: &FileSettings,
        expected: &[Expected<'_>],
    ) -> Result<Database> {
        self.check_place()
            .map_err(|error| open_error(&self.path(), error))?;
        if self.is_empty()? {
            return Err(self.corrupt("it was emptied while it was in use"));
        }
        let locked = || Error::Locked {
            path: self.path(),
            waited: Duration::ZERO,
        };
        self.try_open(settings, expected)?.ok_or_else(locked)
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
            View::Open(database) => Ok(Some(database)),
            View::Unclean | View::Busy => Ok(None),
        }
    }

    /// Refuses what is not a vault of this format, or whose tables are of another kind, without
    /// writing to it. `false`: somebody else has it open.
    fn look(&self, settings: &FileSettings, expected: &[Expected<'_>]) -> Result<bool> {
        match self.attempt(|| self.open_read_only(settings))? {
            View::Open(database) => self.inspect(&database, expected).map(|()| true),
            View::Busy => Ok(false),
            View::Unclean => match self.attempt(|| self.rehearse(settings))? {
                View::Open(database) => self.inspect(&database, expected).map(|()| true),
                View::Unclean | View::Busy => Ok(false),
            },
        }
    }

    /// Opens a vault of this format for reading only.
    pub(super) fn view(&self, settings: &FileSettings) -> Result<View<ReadOnlyDatabase>> {
        if self.is_empty()? {
            return Err(Error::NotAVault {
                path: self.path(),
                reason: "it is empty".into(),
            });
        }
        let view = self.attempt(|| self.open_read_only(settings))?;
        if let View::Open(database) = &view {
            self.inspect(database, &[])?;
        }
        Ok(view)
    }

    /// Recovers and closes a file that was not closed cleanly, unless somebody has it open.
    pub(super) fn repair(&self, settings: &FileSettings) -> Result<()> {
        match self.try_open(settings, &[])? {
            Some(database) => database.close().map_err(|error| self.corrupt(error)),
            None => Ok(()),
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
                    return Err(place::replaced().into());
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
            Ok(Err(redb::Error::Io(error))) => return Err(io_error(self.path(), error)),
            Ok(Err(error)) => return Err(self.corrupt(error)),
            Err(_) => return Err(self.corrupt("the storage engine gave up reading it")),
        };
        stamps.check(&self.path(), expected)
    }

    /// Runs one way of opening and sorts what can come of it.
    fn attempt<D>(&self, open: impl FnOnce() -> Result<D, DatabaseError>) -> Result<View<D>> {
        let path = self.path();
        match catch_unwind(AssertUnwindSafe(open)) {
            Ok(Ok(database)) => Ok(View::Open(database)),
            Ok(Err(error)) => match error {
                DatabaseError::DatabaseAlreadyOpen | DatabaseError::LockProtocolMismatch => {
                    Ok(View::Busy)
                }
                DatabaseError::RepairAborted => Ok(View::Unclean),
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

/// What one way of opening finds.
pub(super) enum View<D> {
    Open(D),
    /// It was not closed cleanly, or somebody is just opening it.
    Unclean,
    /// Somebody has it open who keeps others out.
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

/// The working directory may be another one when the file has to be opened again.
fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(|error| open_error(path, error))
}

pub(super) fn io_error(path: PathBuf, error: io::Error) -> Error {
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

pub(super) fn open_error(path: &Path, source: io::Error) -> Error {
    Error::Open {
        path: path.to_owned(),
        source,
    }
}
