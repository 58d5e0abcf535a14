//! A file system of its own, as small as a test wants it. Needs root.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

/// A file system in memory, gone with this.
pub struct Mount(TempDir);

/// Runs a system program, which has to do well: a test that cannot be set up proves nothing.
#[track_caller]
pub fn run(program: &str, arguments: &[&str], path: &Path) {
    let output = Command::new(program).args(arguments).arg(path).output();
    let output = output.unwrap_or_else(|error| panic!("{program} cannot be run: {error}"));
    assert!(
        output.status.success(),
        "this test needs root and the right to mount; {program} {arguments:?} {path:?} failed: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

const PAGE: usize = 4_096;

impl Mount {
    pub fn new(bytes: usize) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let options = format!("size={bytes}");
        let arguments = ["-t", "tmpfs", "-o", &options, "ratevault-test"];
        run("mount", &arguments, directory.path());
        Self(directory)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// From now on nothing on it can be changed. Nothing may be open for writing.
    pub fn make_read_only(&self) {
        run("mount", &["-o", "remount,ro"], self.0.path());
    }

    /// Takes all the room but that of some pages, until [`free`](Self::free).
    pub fn fill_but(&self, pages: u64) {
        let mut ballast = File::create(self.path("ballast")).unwrap();
        let error = loop {
            if let Err(error) = ballast.write_all(&[0; PAGE]) {
                break error;
            }
        };
        assert_eq!(error.kind(), ErrorKind::StorageFull, "{error}");
        let length = ballast.metadata().unwrap().len();
        ballast.set_len(length - pages * PAGE as u64).unwrap();
    }

    pub fn free(&self) {
        fs::remove_file(self.path("ballast")).unwrap();
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // A test that failed may still have files open.
        let mut unmount = Command::new("umount");
        let _ = unmount.arg("--lazy").arg(self.0.path()).status();
    }
}
