//! Making a vault's file, so that no crash leaves a part of one.

use std::fs::File;
use std::io;
use std::path::Path;

use redb::{Database, DatabaseError, StorageError};

use super::open::open_error;
use crate::error::{Error, Result};

/// Creates a vault file that is whole from the first moment on.
///
/// Crash: redb's own initialisation takes several writes, and a file that a crash leaves between
/// them is no database. So it happens in a temporary file of mode 0600 beside `path`, which then
/// takes its name, unless another process was faster.
pub(super) fn create(path: &Path) -> Result<()> {
    let directory = directory_of(path);
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
        Ok(_) => Ok(()),
        Err(error) if error.error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(open_error(path, error.error)),
    }
}

pub(super) fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Makes the file's name survive a power cut; redb syncs the file alone.
pub(super) fn sync_directory(directory: &Path) -> io::Result<()> {
    if cfg!(unix) {
        File::open(directory)?.sync_all()?;
    }
    Ok(())
}
