//! Where the examples are run as real processes.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread;

use tempfile::TempDir;

/// The program of an example, which lies beside this binary's folder.
pub fn example(name: &str) -> PathBuf {
    let this = std::env::current_exe().unwrap();
    let folder = this.parent().and_then(Path::parent).unwrap();
    let program = folder
        .join("examples")
        .join(format!("{name}{}", std::env::consts::EXE_SUFFIX));
    assert!(
        program.is_file(),
        "{} is not there: run `cargo test`, or `cargo build --examples` first",
        program.display()
    );
    program
}

/// A directory that programs run in.
pub struct Desk(pub TempDir);

/// How a program ended.
#[derive(Debug, PartialEq, Eq)]
pub struct Ended {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl From<Output> for Ended {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

impl Ended {
    /// What was printed by a program that said nothing else and ended with `code`.
    #[track_caller]
    pub fn printed(self, code: i32) -> String {
        assert_eq!((self.code, &*self.err), (Some(code), ""), "{}", self.out);
        self.out
    }

    /// The one line on standard error of a program that failed.
    #[track_caller]
    pub fn failed(self, program: &str) -> String {
        assert_eq!(self.code, Some(3), "{self:?}");
        assert_eq!(self.err.lines().count(), 1, "{self:?}");
        assert!(self.err.starts_with(&format!("{program}: ")), "{self:?}");
        assert!(self.err.ends_with('\n'), "{self:?}");
        self.err
    }
}

impl Desk {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn names(&self) -> BTreeSet<String> {
        fs::read_dir(self.0.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    }

    pub fn command(&self, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(example(program));
        command
            .args(arguments)
            .current_dir(self.0.path())
            .env_remove("RATEVAULT_DB")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    pub fn dump(&self, arguments: &[&str]) -> Ended {
        self.command("dump", arguments).output().unwrap().into()
    }

    pub fn attempt(&self, arguments: &[&str]) -> Ended {
        let mut command = self.command("attempt", arguments);
        command.output().unwrap().into()
    }

    pub fn replay(&self, arguments: &[&str], input: impl AsRef<[u8]>) -> Ended {
        feed(self.command("replay", arguments), input.as_ref())
    }
}

/// Runs a program on an input, of which it need not read everything.
pub fn feed(mut command: Command, input: &[u8]) -> Ended {
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    thread::scope(|scope| {
        scope.spawn(move || {
            if let Err(error) = stdin.write_all(input) {
                assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
            }
        });
        child.wait_with_output().unwrap().into()
    })
}
