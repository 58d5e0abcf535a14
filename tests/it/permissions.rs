//! Files and directories that may not be written: clear errors that name the path, and a running
//! vault that goes on as long as it can.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::thread;

use ratevault::{Error, Snapshot, Vault, VaultBuilder};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

use crate::support::mount::{self, Mount};
use crate::support::{DAY, Number, eventually, key};

fn vault(path: &Path) -> VaultBuilder<Number> {
    Vault::builder("numbers").path(path)
}

/// Adds one to ada's number; what it is now.
fn count(vault: &Vault<Number>) -> ratevault::Result<u64> {
    vault.update(&key("ada"), |slot| {
        let next = slot.take().unwrap_or_default().0 + 1;
        slot.put(Number(next), DAY);
        next
    })
}

/// A closed vault with one hit.
fn one_hit(path: &Path) {
    let vault = vault(path).open().unwrap();
    assert_eq!(count(&vault).unwrap(), 1);
    vault.close().unwrap();
}

/// Runs `act` where permissions hold, as they do not for root, in this thread and those it starts.
fn without_privileges<T: Send>(act: impl FnOnce() -> T + Send) -> T {
    let powers = CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH;
    thread::scope(|scope| {
        let unprivileged = scope.spawn(|| {
            let mut sets = capabilities(None).unwrap();
            sets.effective.remove(powers);
            set_capabilities(None, sets).unwrap();
            act()
        });
        unprivileged.join().unwrap()
    })
}

/// A directory that can be removed again, whatever mode it was given.
struct Directory(tempfile::TempDir);

impl Directory {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn mode(&self, mode: u32) {
        fs::set_permissions(self.0.path(), Permissions::from_mode(mode)).unwrap();
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        self.mode(0o700);
    }
}

#[track_caller]
fn assert_cannot_open<T: std::fmt::Debug>(opened: Result<T, Error>, path: &Path, why: &str) {
    let error = opened.unwrap_err();
    let text = error.to_string();
    for part in [&format!("{path:?}"), why, "$RATEVAULT_DB"] {
        assert!(text.contains(part), "{text}");
    }
    assert_eq!(text.lines().count(), 1, "{text}");
    match error {
        Error::Open { path: named, .. } => assert_eq!(named, path),
        other => panic!("{other:?}"),
    }
}

const DENIED: &str = "Permission denied";
const READ_ONLY: &str = "Read-only file system";

#[test]
fn a_directory_that_cannot_be_written_is_named_when_a_file_is_to_be_made_in_it() {
    let directory = Directory::new();
    directory.mode(0o500);
    let path = directory.0.path().join("vault.redb");
    let opened = without_privileges(|| vault(&path).open());
    assert_cannot_open(opened, &path, DENIED);
    assert_eq!(fs::read_dir(directory.0.path()).unwrap().count(), 0);
}

#[test]
fn a_file_that_cannot_be_written_is_named_left_as_it_is_and_can_still_be_looked_into() {
    let directory = Directory::new();
    let path = directory.0.path().join("vault.redb");
    one_hit(&path);
    let before = fs::read(&path).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o400)).unwrap();
    let (opened, seen) = without_privileges(|| (vault(&path).open(), rows_seen(&path)));
    assert_cannot_open(opened, &path, DENIED);
    assert_eq!(seen, 1);
    assert!(fs::read(&path).unwrap() == before, "it was written to");
}

fn rows_seen(path: &Path) -> u64 {
    let tables = Snapshot::open(path).unwrap().tables().unwrap();
    tables.iter().map(|table| table.rows).sum()
}

#[test]
fn a_file_in_a_directory_that_cannot_be_written_is_opened_and_counted_into() {
    let directory = Directory::new();
    let path = directory.0.path().join("vault.redb");
    one_hit(&path);
    directory.mode(0o500);
    without_privileges(|| {
        let vault = vault(&path).open().unwrap();
        assert_eq!(count(&vault).unwrap(), 2);
        vault.close().unwrap();
    });
}

#[test]
fn a_directory_that_can_no_longer_be_entered_does_not_stop_the_vault_that_is_open_in_it() {
    let directory = Directory::new();
    let path = directory.0.path().join("vault.redb");
    without_privileges(|| {
        let vault = vault(&path).open().unwrap();
        assert_eq!(count(&vault).unwrap(), 1);
        directory.mode(0);
        assert_eq!(count(&vault).unwrap(), 2);
        // That the file loses its name is seen all the same.
        directory.mode(0o700);
        fs::remove_file(&path).unwrap();
        directory.mode(0);
        let text = count(&vault).unwrap_err().to_string();
        assert!(text.contains("deleted or moved away"), "{text}");
        assert!(text.contains(&format!("{path:?}")), "{text}");
    });
}

#[test]
#[ignore = "needs root: mounts a file system"]
fn on_a_file_system_that_is_read_only_opening_names_the_path_and_looking_works() {
    let mount = Mount::new(4 << 20);
    let path = mount.path("vault.redb");
    one_hit(&path);
    mount.make_read_only();
    assert_cannot_open(vault(&path).open(), &path, READ_ONLY);
    let missing = mount.path("missing.redb");
    assert_cannot_open(vault(&missing).open(), &missing, READ_ONLY);
    assert_eq!(rows_seen(&path), 1);
}

#[test]
#[ignore = "needs root: makes a file immutable, on a file system that knows this, such as ext4"]
fn a_file_that_becomes_unwritable_refuses_and_recovers_without_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vault.redb");
    let vault = vault(&path).open().unwrap();
    assert_eq!(count(&vault).unwrap(), 1);
    mount::run("chattr", &["+i"], &path);
    let refused: Vec<_> = (0..3).map(|_| count(&vault)).collect();
    mount::run("chattr", &["-i"], &path);
    for result in refused {
        let error = result.unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::Unavailable { .. }), "{text}");
        assert!(text.contains(&format!("{path:?}")), "{text}");
        assert!(text.contains("not permitted"), "{text}");
    }
    eventually("service resumes", || count(&vault).is_ok());
    let found = vault.get(&key("ada")).unwrap();
    // The commit that met the fault may have been on disk.
    assert!(
        [Some(Number(2)), Some(Number(3))].contains(&found),
        "{found:?}"
    );
    vault.close().unwrap();
}
