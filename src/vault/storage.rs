//! Storage: where a vault's bytes live, and how redb reaches them.
//!
//! redb asks its backend for byte-range locks. A file's come from the operating system through
//! redb's own file backend; a storage that only this process can reach grants every lock, so that
//! it runs the same mode and the same commit protocol as a file does.

use std::fs::File;
use std::io;
use std::ops::Bound;
use std::sync::{Arc, PoisonError, RwLock};

use redb::backends::FileBackend;
use redb::{BackendError, StorageBackend};

/// A place for a vault's bytes that only this process can reach: random access, one writer.
///
/// A failing call makes the vault unavailable until it can be opened again on the same storage.
pub trait Storage: std::fmt::Debug + Send + Sync + 'static {
    /// The length in bytes.
    ///
    /// # Errors
    ///
    /// Whatever keeps the storage from answering; so do the others.
    fn len(&self) -> io::Result<u64>;

    /// Whether there is nothing in it yet.
    ///
    /// # Errors
    ///
    /// As [`len`](Self::len).
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Fills `out` with the bytes from `offset` on.
    ///
    /// # Errors
    ///
    /// As [`len`](Self::len), and if they reach past the end.
    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()>;

    /// Writes `data` from `offset` on; never past the end.
    ///
    /// # Errors
    ///
    /// As [`len`](Self::len).
    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()>;

    /// Sets the length in bytes; new bytes are zero.
    ///
    /// # Errors
    ///
    /// As [`len`](Self::len).
    fn set_len(&self, length: u64) -> io::Result<()>;

    /// Returns once everything written before would survive a power cut.
    ///
    /// # Errors
    ///
    /// As [`len`](Self::len).
    fn sync(&self) -> io::Result<()>;
}

/// A storage in memory. It outlives the vaults opened on it, not the process.
///
/// ```
/// use ratevault::{Key, MemoryStorage, Vault, WindowCount};
/// use std::sync::Arc;
///
/// let storage = Arc::new(MemoryStorage::default());
/// let vault: Vault<WindowCount> = Vault::builder("counts").storage(storage.clone()).open()?;
/// vault.close()?;
/// let again: Vault<WindowCount> = Vault::builder("counts").storage(storage).open()?;
/// assert!(again.is_empty()?);
/// # Ok::<(), ratevault::Error>(())
/// ```
#[derive(Default)]
pub struct MemoryStorage(RwLock<Vec<u8>>);

impl MemoryStorage {
    fn range(offset: u64, length: usize) -> io::Result<std::ops::Range<usize>> {
        let start = usize::try_from(offset).map_err(io::Error::other)?;
        let end = start
            .checked_add(length)
            .ok_or(io::ErrorKind::InvalidInput)?;
        Ok(start..end)
    }
}

impl std::fmt::Debug for MemoryStorage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("MemoryStorage")
    }
}

impl Storage for MemoryStorage {
    fn len(&self) -> io::Result<u64> {
        let bytes = self.0.read().unwrap_or_else(PoisonError::into_inner);
        u64::try_from(bytes.len()).map_err(io::Error::other)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let bytes = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let range = Self::range(offset, out.len())?;
        out.copy_from_slice(bytes.get(range).ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut bytes = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let range = Self::range(offset, data.len())?;
        let place = bytes.get_mut(range).ok_or(io::ErrorKind::UnexpectedEof)?;
        place.copy_from_slice(data);
        Ok(())
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        let mut bytes = self.0.write().unwrap_or_else(PoisonError::into_inner);
        bytes.resize(usize::try_from(length).map_err(io::Error::other)?, 0);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

type Locked<T> = std::result::Result<T, BackendError>;

/// A [`Storage`] as redb wants it: every lock is granted.
#[derive(Debug)]
pub(super) struct PrivateBackend(pub(super) Arc<dyn Storage>);

impl StorageBackend for PrivateBackend {
    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.read(offset, out)
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        self.0.set_len(length)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.sync()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write(offset, data)
    }

    fn try_lock_range(&self, _: Bound<u64>, _: Bound<u64>) -> Locked<bool> {
        Ok(true)
    }

    fn try_lock_shared_range(&self, _: Bound<u64>, _: Bound<u64>) -> Locked<bool> {
        Ok(true)
    }

    fn lock_range(&self, _: Bound<u64>, _: Bound<u64>) -> Locked<()> {
        Ok(())
    }

    fn lock_shared_range(&self, _: Bound<u64>, _: Bound<u64>) -> Locked<()> {
        Ok(())
    }

    fn unlock_range(&self, _: Bound<u64>, _: Bound<u64>) -> Locked<()> {
        Ok(())
    }

    fn query_lock_range(&self, _: Bound<u64>, _: Bound<u64>) -> Locked<bool> {
        Ok(false)
    }
}

/// What a file that cannot be locked as a whole is refused with.
#[derive(Debug, thiserror::Error)]
#[error("the file system offers no file locks")]
pub(super) struct NoLocks;

/// A file as redb wants it, where a file system without locks is an error.
///
/// redb's exclusive mode would open such a file unprotected: it tries ranges first, then the whole
/// file, and takes "unsupported" on that for an answer. Here that last answer is [`NoLocks`].
#[derive(Debug)]
pub(super) struct FileLocks<B>(B);

impl FileLocks<FileBackend> {
    pub(super) fn new(file: File) -> std::result::Result<Self, redb::DatabaseError> {
        FileBackend::new(file).map(Self)
    }
}

fn refuse_unlockable(start: Bound<u64>, end: Bound<u64>, answer: Locked<bool>) -> Locked<bool> {
    let whole = matches!(start, Bound::Unbounded | Bound::Included(0)) && end == Bound::Unbounded;
    let unsupported = match &answer {
        Err(BackendError::Unsupported) => true,
        Err(BackendError::Io(error)) => error.kind() == io::ErrorKind::Unsupported,
        _ => false,
    };
    if whole && unsupported {
        return Err(BackendError::Io(io::Error::other(NoLocks)));
    }
    answer
}

impl<B: StorageBackend> StorageBackend for FileLocks<B> {
    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.read(offset, out)
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        self.0.set_len(length)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write(offset, data)
    }

    fn close(&self) -> io::Result<()> {
        self.0.close()
    }

    fn try_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Locked<bool> {
        refuse_unlockable(start, end, self.0.try_lock_range(start, end))
    }

    fn try_lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> Locked<bool> {
        refuse_unlockable(start, end, self.0.try_lock_shared_range(start, end))
    }

    fn lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Locked<()> {
        self.0.lock_range(start, end)
    }

    fn lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> Locked<()> {
        self.0.lock_shared_range(start, end)
    }

    fn unlock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Locked<()> {
        self.0.unlock_range(start, end)
    }

    fn query_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Locked<bool> {
        self.0.query_lock_range(start, end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use redb::{Builder, ConcurrencyMode, DatabaseError, StorageError, backends::InMemoryBackend};

    /// redb's in-memory backend answers "unsupported" to every lock, as a file system might.
    #[test]
    fn a_file_system_without_locks_is_an_error_in_every_mode() {
        let open = |mode| {
            Builder::new()
                .set_concurrency_mode(mode)
                .create_with_backend(FileLocks(InMemoryBackend::new()))
        };
        match open(ConcurrencyMode::ExclusiveWriter) {
            Err(DatabaseError::Storage(StorageError::Io(error))) => {
                assert!(error.get_ref().is_some_and(|inner| inner.is::<NoLocks>()));
            }
            other => panic!("{other:?}"),
        }
        assert!(matches!(
            open(ConcurrencyMode::SingleWriter),
            Err(DatabaseError::Storage(StorageError::Unsupported))
        ));
    }
}
