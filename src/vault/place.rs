//! Whether an open file is still in its place: somebody may delete it, move it away, or put another
//! one there.
//!
//! What is written to such a file is nowhere once this process ends, and whoever opens its path
//! meanwhile counts apart. So the writer asks before every transaction, and again after its commit,
//! before anybody is answered: a few microseconds each, where a commit waits for the disk. A file that
//! is out of place is a fault of the storage like any other: calls fail until it is back.

use std::io;
use std::path::Path;

/// An error unless `file` is what `path` leads to. On Unix; elsewhere there is none.
#[cfg(unix)]
pub(super) fn check(path: &Path, file: &same_file::Handle) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt;

    match path.metadata() {
        Ok(found) if (found.dev(), found.ino()) == (file.dev(), file.ino()) => Ok(()),
        Ok(_) => Err(replaced()),
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            ) =>
        {
            Err(gone())
        }
        // A process that gave up its rights may not see what it has open. It goes on for as long as
        // the file has a name at all.
        Err(_) if file.as_file().metadata()?.nlink() > 0 => Ok(()),
        Err(_) => Err(gone()),
    }
}

#[cfg(not(unix))]
pub(super) fn check(_: &Path, _: &same_file::Handle) -> io::Result<()> {
    Ok(())
}

#[cfg(unix)]
fn gone() -> io::Error {
    let text = "the file was deleted or moved away while it was in use; put it back, or close the vault and open it again to start anew";
    io::Error::new(io::ErrorKind::NotFound, text)
}

pub(super) fn replaced() -> io::Error {
    io::Error::other(
        "another file has taken its place while it was in use; put the old one back, or close the vault and open it again to take the new one",
    )
}
