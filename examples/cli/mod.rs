//! How the examples end, as programs.

use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

/// Keeps panics of the storage engine from standard error: the library turns them into errors.
pub(crate) fn quiet_storage() {
    let others = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let file = panic.location().map_or("", |location| location.file());
        if !file.contains("redb-") {
            others(panic);
        }
    }));
}

/// Says in one line what went wrong. The program is to end with the code returned, 3.
pub(crate) fn failure(program: &str, error: impl fmt::Display) -> ExitCode {
    // Nobody is left to hear that standard error is closed.
    let _ = writeln!(io::stderr().lock(), "{program}: {error}");
    ExitCode::from(3)
}

/// Whether somebody still reads: a closed pipe is no error, but a reason to end quietly.
pub(crate) fn still_read(written: io::Result<()>) -> io::Result<bool> {
    match written {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => {
            let message = format!("cannot write to standard output: {error}");
            Err(io::Error::new(error.kind(), message))
        }
    }
}
