//! A file that is deleted, moved away or replaced while it is in use: nobody is told that something
//! is stored which nobody will find.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ratevault::{Applied, Durability, Error, Vault};
use tempfile::TempDir;

use crate::support::{DAY, Number, eventually, key};

/// One that flushes only when it is asked to.
const BUFFERED: Durability = Durability::Buffered { flush_every: DAY };

const BOTH: [Durability; 2] = [Durability::Committed, BUFFERED];

const GONE: &str = "deleted or moved away";
const REPLACED: &str = "another file has taken its place";

fn place() -> (TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vault.redb");
    (directory, path)
}

fn open(path: &Path, durability: Durability) -> Vault<Number> {
    let vault = Vault::builder("numbers").path(path).durability(durability);
    vault.lock_timeout(Duration::ZERO).open().unwrap()
}

/// Adds one to a client's number and has the disk have it; what it is now.
fn count(vault: &Vault<Number>, client: &str) -> ratevault::Result<u64> {
    let number = vault.update(&key(client), |slot| {
        let next = slot.take().unwrap_or_default().0 + 1;
        slot.put(Number(next), DAY);
        next
    })?;
    vault.flush()?;
    Ok(number)
}

/// A vault in which one hit was counted.
fn one_hit(path: &Path, durability: Durability) -> Vault<Number> {
    let vault = open(path, durability);
    assert_eq!(count(&vault, "ada").unwrap(), 1);
    vault
}

#[track_caller]
fn assert_out_of_place<T: std::fmt::Debug>(
    result: Result<T, Error>,
    path: &Path,
    why: &str,
) -> Applied {
    let error = result.unwrap_err();
    let text = error.to_string();
    assert!(text.contains(&format!("{path:?}")), "{text}");
    assert!(text.contains(why), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    match error {
        Error::Unavailable { applied, .. } => applied,
        other => panic!("{other:?}"),
    }
}

/// What a file holds that may have no name any more.
fn stored(mut file: File, client: &str) -> Option<Number> {
    let (_directory, path) = place();
    io::copy(&mut file, &mut File::create(&path).unwrap()).unwrap();
    open(&path, Durability::Committed)
        .get(&key(client))
        .unwrap()
}

#[test]
fn nothing_is_counted_into_a_file_that_was_deleted() {
    for durability in BOTH {
        let (directory, path) = place();
        let vault = one_hit(&path, durability);
        let file = File::open(&path).unwrap();
        fs::remove_file(&path).unwrap();
        for _ in 0..2 {
            let applied = assert_out_of_place(count(&vault, "ada"), &path, GONE);
            assert_eq!(applied, Applied::No);
        }
        // Neither is anything read any more that the file alone knows.
        eventually("it is closed", || vault.get(&key("stranger")).is_err());
        assert_out_of_place(vault.get(&key("stranger")), &path, GONE);
        assert_out_of_place(vault.close(), &path, GONE);
        assert_eq!(stored(file, "ada"), Some(Number(1)), "{durability:?}");
        let names = fs::read_dir(directory.path()).unwrap().count();
        assert_eq!(names, 0, "nothing was made in its place");
        // Whoever opens it again starts anew.
        assert_eq!(count(&open(&path, durability), "ada").unwrap(), 1);
    }
}

#[test]
fn nothing_is_counted_into_a_file_that_another_one_replaced_nor_into_the_other_one() {
    for durability in BOTH {
        let (directory, path) = place();
        let other = directory.path().join("other.redb");
        let vault = open(&other, Durability::Committed);
        for number in 1..=3 {
            assert_eq!(count(&vault, "ada").unwrap(), number);
        }
        vault.close().unwrap();
        let vault = one_hit(&path, durability);
        let file = File::open(&path).unwrap();
        fs::rename(&other, &path).unwrap();
        let before = fs::read(&path).unwrap();
        for _ in 0..2 {
            let applied = assert_out_of_place(count(&vault, "ada"), &path, REPLACED);
            assert_eq!(applied, Applied::No);
        }
        assert_out_of_place(vault.close(), &path, REPLACED);
        assert_eq!(stored(file, "ada"), Some(Number(1)), "{durability:?}");
        assert!(fs::read(&path).unwrap() == before, "it was written to");
        assert_eq!(count(&open(&path, durability), "ada").unwrap(), 4);
    }
}

#[test]
fn whatever_takes_the_place_of_a_file_is_left_as_it_is() {
    for durability in BOTH {
        let (directory, path) = place();
        let vault = one_hit(&path, durability);
        let old = directory.path().join("old.redb");
        fs::rename(&path, &old).unwrap();
        fs::write(&path, "no vault").unwrap();
        assert_out_of_place(count(&vault, "ada"), &path, REPLACED);
        fs::write(&path, "").unwrap();
        assert_out_of_place(count(&vault, "ada"), &path, REPLACED);
        assert_out_of_place(vault.close(), &path, REPLACED);
        assert_eq!(fs::read(&path).unwrap(), b"");
    }
}

#[test]
fn a_hit_during_whose_commit_the_file_is_deleted_is_not_answered_as_if_stored() {
    let (_directory, path) = place();
    let vault = one_hit(&path, Durability::Committed);
    let name = path.clone();
    let counted = vault.update(&key("ada"), move |slot| {
        slot.put(Number(2), DAY);
        fs::remove_file(name).unwrap();
    });
    let applied = assert_out_of_place(counted, &path, GONE);
    assert_eq!(applied, Applied::Unknown);
}

#[test]
fn service_resumes_with_every_answered_hit_when_the_file_is_back() {
    for durability in BOTH {
        let (directory, path) = place();
        let vault = one_hit(&path, durability);
        let away = directory.path().join("away.redb");
        fs::rename(&path, &away).unwrap();
        assert_out_of_place(count(&vault, "bob"), &path, GONE);
        fs::rename(&away, &path).unwrap();
        eventually("service resumes", || count(&vault, "eve").is_ok());
        assert_eq!(count(&vault, "ada").unwrap(), 2);
        vault.close().unwrap();
        let vault = open(&path, Durability::Committed);
        assert_eq!(vault.get(&key("ada")).unwrap(), Some(Number(2)));
        vault.close().unwrap();
    }
}

#[test]
fn a_buffered_table_decides_in_memory_until_its_file_is_back_and_tells_of_it() {
    let (directory, path) = place();
    let vault = one_hit(&path, BUFFERED);
    let away = directory.path().join("away.redb");
    fs::rename(&path, &away).unwrap();
    for number in 2..=5 {
        let counted = vault.update(&key("ada"), move |slot| slot.put(Number(number), DAY));
        counted.unwrap();
    }
    assert_out_of_place(vault.flush(), &path, GONE);
    let stats = vault.stats().unwrap();
    let error = stats.last_flush_error.unwrap().to_string();
    assert!(error.contains(GONE), "{error}");
    assert!(stats.oldest_unflushed.is_some());
    fs::rename(&away, &path).unwrap();
    eventually("it is flushed", || vault.flush().is_ok());
    let stats = vault.stats().unwrap();
    assert!(stats.last_flush_error.is_none(), "{stats:?}");
    assert_eq!(stats.oldest_unflushed, None);
    // As a power cut would leave it.
    assert_eq!(
        stored(File::open(&path).unwrap(), "ada"),
        Some(Number(5)),
        "it was carried"
    );
}

#[test]
fn closing_a_vault_whose_file_is_gone_says_so() {
    for durability in BOTH {
        let (_directory, path) = place();
        let vault = one_hit(&path, durability);
        fs::remove_file(&path).unwrap();
        assert_out_of_place(vault.close(), &path, GONE);
    }
}

#[test]
fn other_names_of_a_file_may_come_and_go() {
    use std::os::unix::fs::symlink;

    for durability in BOTH {
        let (directory, path) = place();
        let link = directory.path().join("link.redb");
        let other = directory.path().join("other.redb");
        drop(one_hit(&path, durability));
        symlink(&path, &link).unwrap();
        let vault = open(&link, durability);
        fs::hard_link(&path, &other).unwrap();
        assert_eq!(count(&vault, "ada").unwrap(), 2);
        fs::remove_file(&other).unwrap();
        assert_eq!(count(&vault, "ada").unwrap(), 3);
        // It is the path that was opened which has to lead to it.
        fs::remove_file(&link).unwrap();
        assert_out_of_place(count(&vault, "ada"), &link, GONE);
    }
}
