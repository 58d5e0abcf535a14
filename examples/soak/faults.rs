//! A disk that refuses: the limit on the size of a process's files is set to nothing from outside, so that
//! every write to one fails.

use std::io;
use std::process::{Child, Command};

/// A command that runs `program`, so that a write beyond the limit is an error and not a signal.
#[cfg(target_os = "linux")]
pub(crate) fn command(program: &std::path::Path) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", r#"trap "" XFSZ; exec "$0" "$@""#]);
    command.arg(program);
    command
}

/// Has every write of a process to a file fail, or no longer. Says whether it can be done here.
#[cfg(target_os = "linux")]
pub(crate) fn refuse(child: &Child, refuse: bool) -> io::Result<bool> {
    use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};

    let of_ours = getrlimit(Resource::Fsize);
    let current = if refuse { Some(0) } else { of_ours.current };
    let limit = Rlimit {
        current,
        maximum: of_ours.maximum,
    };
    prlimit(Some(Pid::from_child(child)), Resource::Fsize, limit)?;
    Ok(true)
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn command(program: &std::path::Path) -> Command {
    Command::new(program)
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn refuse(_: &Child, _: bool) -> io::Result<bool> {
    Ok(false)
}
