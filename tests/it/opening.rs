//! Opening: who gets the file, what is refused, and what is left as it was.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use ratevault::{
    Durability, Error, FixedWindow, HitLog, Key, Limiter, ManualClock, Quota, Result, Row,
    SlidingWindow, SystemClock, Vault, VaultBuilder, WindowCount,
};
use redb::TableDefinition;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

const TABLE: &str = "rate_limits";
const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// Long enough for any machine; only a test that fails waits for it.
const PATIENCE: Duration = Duration::from_secs(60);

/// A directory of its own, and the path of a vault in it that is not there yet.
fn place() -> (TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vault.redb");
    (directory, path)
}

fn hits(path: &Path) -> VaultBuilder<HitLog> {
    Vault::builder(TABLE).path(path)
}

fn counts(path: &Path) -> VaultBuilder<WindowCount> {
    Vault::builder(TABLE).path(path)
}

/// A limiter of 10,000 a day.
fn limiter(vault: VaultBuilder<HitLog>) -> Limiter<SlidingWindow> {
    try_limiter(vault).unwrap()
}

fn try_limiter(vault: VaultBuilder<HitLog>) -> Result<Limiter<SlidingWindow>> {
    let window = SlidingWindow::new(Quota::per_day(LIMIT)?)?;
    Ok(Limiter::new(vault.open()?, window))
}

const LIMIT: u32 = 10_000;

/// One hit, and how many there are now.
fn hit(limiter: &Limiter<SlidingWindow>) -> u32 {
    LIMIT - limiter.check("login", "ada").unwrap().remaining()
}

fn hits_of(limiter: &Limiter<SlidingWindow>, client: &str) -> u32 {
    LIMIT - limiter.peek("login", client).unwrap().remaining()
}

fn count_hits(path: &Path) -> u32 {
    let limiter = limiter(hits(path));
    let count = hits_of(&limiter, "ada");
    limiter.vault().close().unwrap();
    count
}

/// A vault file with one hit in it, closed.
fn closed_vault(path: &Path) {
    let limiter = limiter(hits(path));
    assert_eq!(hit(&limiter), 1);
    limiter.vault().close().unwrap();
}

/// The files of a directory.
fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

// One process shares a file.

#[test]
fn all_vaults_on_one_file_share_it_whatever_path_they_name() {
    let (directory, path) = place();
    let first = limiter(hits(&path));
    assert_eq!(hit(&first), 1);
    for (others, named) in (1..).zip(other_names(&directory, &path)) {
        let other = limiter(hits(&named));
        assert_eq!(hit(&other), 2 * others, "{}", named.display());
        assert_eq!(hit(&first), 2 * others + 1, "{}", named.display());
    }
    drop(first);
}

/// Paths that lead to the file at `path`.
fn other_names(directory: &TempDir, path: &Path) -> Vec<PathBuf> {
    let here = std::env::current_dir().unwrap().canonicalize().unwrap();
    let up: PathBuf = here.components().skip(1).map(|_| "..").collect();
    let from_root: PathBuf = path.canonicalize().unwrap().components().skip(1).collect();
    let mut names = vec![
        path.to_owned(),
        directory.path().join(".").join("vault.redb"),
        up.join(from_root),
    ];
    let hard = directory.path().join("hard");
    fs::hard_link(path, &hard).unwrap();
    names.push(hard);
    if cfg!(unix) {
        let soft = directory.path().join("soft");
        #[cfg(unix)]
        std::os::unix::fs::symlink("vault.redb", &soft).unwrap();
        names.push(soft);
    }
    names
}

#[test]
fn tables_of_one_file_count_apart() {
    let (_directory, path) = place();
    let one = limiter(hits(&path));
    let two = limiter(Vault::builder("another").path(&path));
    assert_eq!((hit(&one), hit(&one), hit(&two)), (1, 2, 1));
    drop((one, two));
    assert_eq!(count_hits(&path), 2);
}

#[test]
fn a_conflicting_setting_is_an_error_that_names_both_values() {
    let (_directory, path) = place();
    let open = hits(&path)
        .cache_bytes(1 << 20)
        .lock_timeout(Duration::from_secs(7))
        .background_sweep(false)
        .max_keys(70)
        .open()
        .unwrap();
    for (builder, setting, there, asked) in [
        (hits(&path).exclusive(), "exclusive", "false", "true"),
        (
            hits(&path).cache_bytes(2 << 20),
            "cache_bytes",
            "1048576",
            "2097152",
        ),
        (
            hits(&path).lock_timeout(Duration::from_secs(8)),
            "lock_timeout",
            "7s",
            "8s",
        ),
        (
            hits(&path).background_sweep(true),
            "background_sweep",
            "false",
            "true",
        ),
        (hits(&path).max_keys(71), "max_keys", "70", "71"),
        (
            hits(&path).clock(Arc::new(ManualClock::default())),
            "clock",
            "SystemClock",
            "ManualClock",
        ),
        (
            hits(&path).clock(Arc::new(SystemClock)),
            "clock",
            "SystemClock",
            "another clock",
        ),
    ] {
        let error = builder.open().unwrap_err();
        let text = error.to_string();
        assert!(text.contains(&format!("{path:?}")), "{text}");
        assert!(text.contains("leave it unset"), "{text}");
        match error {
            Error::Conflict {
                setting: found,
                open,
                requested,
                ..
            } => {
                assert_eq!(found, setting);
                assert!(open.contains(there), "{setting}: {open}");
                assert!(requested.contains(asked), "{setting}: {requested}");
                assert!(text.contains(there) && text.contains(asked), "{text}");
            }
            other => panic!("{setting}: {other:?}"),
        }
    }
    // Nobody was harmed.
    assert_eq!(open.len().unwrap(), 0);
}

#[test]
fn what_is_left_unset_takes_what_is_there() {
    let (_directory, path) = place();
    let clock = Arc::new(ManualClock::default());
    let first = limiter(
        hits(&path)
            .exclusive()
            .cache_bytes(1 << 20)
            .lock_timeout(Duration::from_secs(7))
            .background_sweep(false)
            .clock(clock.clone())
            .max_keys(70),
    );
    let again = limiter(hits(&path));
    assert_eq!(again.vault().stats().unwrap().max_keys, 70);
    // It dates hits by the manual clock, too.
    clock.set(ratevault::Timestamp::from_millis(5));
    let reset_at = again.check("login", "ada").unwrap().reset_at();
    assert_eq!(u128::from(reset_at.as_millis()), 5 + DAY.as_millis());
    // Saying the same again is no conflict.
    limiter(
        hits(&path)
            .exclusive()
            .cache_bytes(1 << 20)
            .lock_timeout(Duration::from_secs(7))
            .background_sweep(false)
            .clock(clock)
            .max_keys(70),
    );
    drop(first);
}

#[test]
fn settings_go_with_the_last_handle() {
    let (_directory, path) = place();
    let first = hits(&path).exclusive().max_keys(70).open().unwrap();
    drop(first);
    let second = hits(&path).max_keys(71).lock_timeout(Duration::ZERO).open();
    assert_eq!(second.unwrap().stats().unwrap().max_keys, 71);
}

#[test]
fn another_kind_is_refused_and_harms_nobody() {
    let (_directory, path) = place();
    let first = limiter(hits(&path));
    assert_eq!(hit(&first), 1);
    let check = |error: Error| {
        let text = error.to_string();
        match error {
            Error::WrongKind {
                table,
                found,
                expected,
                ..
            } => {
                assert_eq!(table, TABLE);
                assert_eq!((&*found, expected), ("sliding-log/1", "fixed-window/1"));
            }
            other => panic!("{other:?}"),
        }
        assert!(text.contains("name another table"), "{text}");
    };
    // A handle of it is there.
    check(counts(&path).open().unwrap_err());
    assert_eq!(hit(&first), 2);
    // The file is open, but not this table of it.
    let other: Vault<WindowCount> = Vault::builder("fixed").path(&path).open().unwrap();
    first.vault().close().unwrap();
    drop((first, other));
    let other: Vault<WindowCount> = Vault::builder("fixed").path(&path).open().unwrap();
    check(counts(&path).open().unwrap_err());
    assert_eq!(hit(&limiter(hits(&path))), 3);
    drop(other);
    // Nothing is open.
    check(counts(&path).open().unwrap_err());
    assert_eq!(count_hits(&path), 3);
}

#[test]
fn drop_then_new_never_meets_a_lock_of_our_own() {
    let (_directory, path) = place();
    for round in 1..=50 {
        let limiter = limiter(hits(&path).lock_timeout(Duration::ZERO));
        assert_eq!(hit(&limiter), round);
    }
}

#[test]
fn close_then_new_works_while_old_handles_exist() {
    let (_directory, path) = place();
    let old = limiter(hits(&path).lock_timeout(Duration::ZERO));
    assert_eq!(hit(&old), 1);
    old.vault().close().unwrap();
    let new = limiter(hits(&path).lock_timeout(Duration::ZERO));
    assert_eq!(hit(&new), 2);
    let closed = old.check("login", "ada").unwrap_err();
    assert!(matches!(closed, Error::Closed { .. }), "{closed:?}");
    let closed = old.peek("login", "ada").unwrap_err();
    assert!(matches!(closed, Error::Closed { .. }), "{closed:?}");
    // The old handle has no part in the new one's file any more.
    drop(old);
    assert_eq!(hit(&new), 3);
}

#[test]
fn concurrent_opens_of_one_file_never_meet_a_lock_of_our_own() {
    for threads in [2, 8] {
        let (directory, path) = place();
        let rounds = 24;
        let start = Barrier::new(threads);
        thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    start.wait();
                    for round in 0..rounds {
                        let limiter = limiter(hits(&path).lock_timeout(Duration::ZERO));
                        hit(&limiter);
                        if round % 3 == 0 {
                            // Somebody else's hit may have been under way: it counts or is told.
                            limiter.vault().flush().unwrap();
                        }
                    }
                });
            }
        });
        let expected = u32::try_from(threads).unwrap() * rounds;
        assert_eq!(count_hits(&path), expected);
        assert_eq!(names(directory.path()), ["vault.redb"]);
    }
}

#[test]
fn concurrent_opens_and_closes_lose_no_answered_hit() {
    let (_directory, path) = place();
    let (threads, rounds) = (4, 60);
    let start = Barrier::new(threads);
    let counted: u32 = thread::scope(|scope| {
        let work = || {
            start.wait();
            let mut counted = 0;
            for _ in 0..rounds {
                let limiter = limiter(hits(&path).lock_timeout(Duration::ZERO));
                match limiter.check("login", "ada") {
                    Ok(_) => counted += 1,
                    // Another thread closed the file for all.
                    Err(Error::Closed { .. }) => {}
                    Err(error) => panic!("{error:?}"),
                }
                limiter.vault().close().unwrap();
            }
            counted
        };
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        running.into_iter().map(|one| one.join().unwrap()).sum()
    });
    assert!(counted > 0);
    assert_eq!(count_hits(&path), counted);
}

#[cfg(unix)]
#[test]
fn a_file_that_takes_the_place_of_another_is_another_one() {
    let (directory, path) = place();
    let old = limiter(hits(&path));
    assert_eq!(hit(&old), 1);
    let moved = directory.path().join("moved.redb");
    fs::rename(&path, &moved).unwrap();
    let new = limiter(hits(&path));
    assert_eq!(hit(&new), 1);
    old.vault().close().unwrap_err();
    assert_eq!(hit(&limiter(hits(&moved))), 2);
    assert_eq!(hit(&new), 2);
}

// What opening makes.

#[cfg(unix)]
#[test]
fn a_new_file_is_its_owners_alone_and_the_only_one() {
    use std::os::unix::fs::PermissionsExt;

    let (directory, path) = place();
    let vault = hits(&path).open().unwrap();
    let mode = || fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode() & 0o7777, 0o600);
    assert_eq!(names(directory.path()), ["vault.redb"]);
    vault.close().unwrap();
    assert_eq!(mode() & 0o7777, 0o600);
    assert_eq!(names(directory.path()), ["vault.redb"]);
}

#[test]
fn an_empty_file_is_initialised() {
    let (directory, path) = place();
    fs::write(&path, "").unwrap();
    closed_vault(&path);
    assert_eq!(count_hits(&path), 1);
    assert_eq!(names(directory.path()), ["vault.redb"]);
}

#[test]
fn a_missing_directory_is_named_and_not_made() {
    let (directory, _) = place();
    let missing = directory.path().join("not there");
    let path = missing.join("vault.redb");
    let error = hits(&path).open().unwrap_err();
    let text = error.to_string();
    assert!(text.contains(&format!("{missing:?}")), "{text}");
    assert!(text.contains("create it"), "{text}");
    assert!(text.contains("$RATEVAULT_DB"), "{text}");
    match error {
        Error::NoDirectory { directory, .. } => assert_eq!(directory, missing),
        other => panic!("{other:?}"),
    }
    assert!(names(directory.path()).is_empty());
}

#[test]
fn what_is_no_file_is_refused() {
    let (directory, path) = place();
    closed_vault(&path);
    for unusable in [directory.path().to_owned(), path.join("below a file")] {
        let error = hits(&unusable).open().unwrap_err();
        match &error {
            Error::Open { path, .. } => assert_eq!(*path, unusable),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(names(directory.path()), ["vault.redb"]);
}

#[test]
fn settings_that_cannot_be_are_refused_before_anything_is_made() {
    let (directory, path) = place();
    let table = |name: &str| Vault::<HitLog>::builder(name).path(&path);
    for (builder, setting) in [
        (table(TABLE).max_keys(0), "max_keys"),
        (table(""), "table"),
        (table(&"t".repeat(129)), "table"),
        (table(&"\u{e9}".repeat(65)), "table"),
        (table("two\nlines"), "table"),
    ] {
        let error = builder.open().unwrap_err();
        assert_eq!(error.to_string().lines().count(), 1, "{error}");
        match error {
            Error::InvalidSetting { setting: found, .. } => assert_eq!(found, setting),
            other => panic!("{setting}: {other:?}"),
        }
    }
    assert!(names(directory.path()).is_empty());
    table(&"t".repeat(128)).max_keys(1).open().unwrap();
}

// What opening refuses, and leaves as it was.

/// The error with which `path` is refused, and with not one byte of it changed.
fn refused(vault: VaultBuilder<HitLog>, path: &Path) -> Error {
    let before = fs::read(path).unwrap();
    let error = vault.lock_timeout(Duration::ZERO).open().unwrap_err();
    assert_eq!(error.to_string().lines().count(), 1, "{error}");
    assert!(error.to_string().contains(&format!("{path:?}")), "{error}");
    assert!(fs::read(path).unwrap() == before, "changed: {error}");
    error
}

const FOREIGN: TableDefinition<'_, &str, u64> = TableDefinition::new("foreign");
const STAMPS: TableDefinition<'_, &str, &str> = TableDefinition::new("ratevault");

/// A redb file that is somebody else's, still open.
fn foreign_database(path: &Path) -> redb::Database {
    let database = redb::Database::create(path).unwrap();
    let txn = database.begin_write().unwrap();
    txn.open_table(FOREIGN).unwrap().insert("one", 1).unwrap();
    txn.commit().unwrap();
    database
}

/// A vault of a format that is not known yet, still open.
fn newer_database(path: &Path) -> redb::Database {
    closed_vault(path);
    let database = redb::Database::open(path).unwrap();
    let txn = database.begin_write().unwrap();
    let mut stamps = txn.open_table(STAMPS).unwrap();
    let known = stamps.insert("format", "2").unwrap();
    assert_eq!(known.unwrap().value(), "1");
    drop(stamps);
    txn.commit().unwrap();
    database
}

pub(super) fn newer_vault(path: &Path) {
    drop(newer_database(path));
}

pub(super) fn vault_of_fixed_windows(path: &Path) {
    let window = FixedWindow::new(Quota::per_day(LIMIT).unwrap());
    let limiter = Limiter::new(counts(path).open().unwrap(), window);
    limiter.check("login", "ada").unwrap();
    limiter.vault().close().unwrap();
}

pub(super) fn truncated_vault(path: &Path) {
    closed_vault(path);
    let length = fs::metadata(path).unwrap().len();
    let file = fs::File::options().write(true).open(path).unwrap();
    file.set_len(length / 2).unwrap();
}

#[test]
fn what_is_not_a_vault_is_refused_unchanged() {
    let (_directory, path) = place();
    for bytes in [
        &b"#!/bin/sh\necho not a vault\n"[..],
        &b"x"[..],
        &b"redb"[..],
        &[0; 8_192],
        &[0xff; 1 << 20],
    ] {
        fs::write(&path, bytes).unwrap();
        match refused(hits(&path), &path) {
            Error::NotAVault { .. } | Error::Corrupt { .. } => {}
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_text_file_is_said_to_be_no_vault() {
    let (_directory, path) = place();
    for text in ["one line\n".into(), "many lines\n".repeat(10_000)] {
        fs::write(&path, text).unwrap();
        let error = refused(hits(&path), &path);
        assert!(matches!(error, Error::NotAVault { .. }), "{error:?}");
        assert!(error.to_string().contains("name another file"), "{error}");
    }
}

#[test]
fn a_redb_file_of_somebody_else_is_refused_unchanged() {
    let (_directory, path) = place();
    drop(foreign_database(&path));
    let error = refused(hits(&path), &path);
    assert!(matches!(error, Error::NotAVault { .. }), "{error:?}");
}

#[test]
fn a_newer_format_is_refused_unchanged() {
    let (_directory, path) = place();
    newer_vault(&path);
    match refused(hits(&path), &path) {
        Error::NewerFormat {
            found, supported, ..
        } => assert_eq!((&*found, supported), ("2", "1")),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_table_of_another_kind_is_refused_unchanged() {
    let (_directory, path) = place();
    vault_of_fixed_windows(&path);
    match refused(hits(&path), &path) {
        Error::WrongKind {
            found, expected, ..
        } => assert_eq!((&*found, expected), ("fixed-window/1", "sliding-log/1")),
        other => panic!("{other:?}"),
    }
}

/// A row of known content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Note(u64);

impl Row for Note {
    const KIND: &'static str = "note/1";
}

fn notes(path: &Path) -> VaultBuilder<Note> {
    Vault::builder("notes")
        .path(path)
        .lock_timeout(Duration::ZERO)
        .background_sweep(false)
}

fn note(number: u64) -> (Key, Note) {
    let key = Key::new("note", &number.to_string()).unwrap();
    (key, Note(number.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
}

const NOTES: u64 = 200;

/// The bytes of a vault that was closed cleanly, with `NOTES` rows.
fn bytes_of_notes(path: &Path) -> Vec<u8> {
    let vault = notes(path).open().unwrap();
    for (key, value) in (0..NOTES).map(note) {
        vault.put(&key, value, DAY).unwrap();
    }
    vault.close().unwrap();
    fs::read(path).unwrap()
}

/// How a vault of notes opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Opened {
    Refused(&'static str),
    /// Every row is there and right, or an error.
    Right,
    /// A row is missing or another one, without an error.
    Wrong,
}

fn open_notes(path: &Path) -> Opened {
    let vault = match notes(path).open() {
        Ok(vault) => vault,
        Err(error) => {
            let text = error.to_string();
            assert_eq!(text.lines().count(), 1, "{text}");
            return Opened::Refused(match error {
                Error::NotAVault { .. } => "not a vault",
                Error::NewerFormat { .. } => "newer format",
                Error::WrongKind { .. } => "wrong kind",
                Error::Corrupt { .. } => "corrupt",
                Error::Open { .. } => "cannot be opened",
                Error::Unavailable { .. } => "unavailable",
                other => panic!("{other:?}"),
            });
        }
    };
    let mut missing: BTreeMap<_, _> = (0..NOTES).map(note).collect();
    let mut damaged = 0;
    for entry in vault.scan() {
        match entry {
            Ok(entry) if missing.remove(&entry.key) == Some(entry.value) => {}
            Ok(_) => return Opened::Wrong,
            Err(_) => damaged += 1,
        }
    }
    if missing.len() <= damaged {
        Opened::Right
    } else {
        Opened::Wrong
    }
}

#[test]
fn a_vault_truncated_after_a_clean_close_is_refused_unchanged() {
    let (_directory, path) = place();
    let whole = bytes_of_notes(&path);
    let odd = [1, 9, 10, 319, 321, 4_095, 4_097, whole.len() - 1];
    let lengths = (512..whole.len()).step_by(512).chain(odd);
    let mut faults = Vec::new();
    for length in lengths {
        fs::write(&path, &whole[..length]).unwrap();
        let opened = open_notes(&path);
        if !matches!(opened, Opened::Refused("not a vault" | "corrupt")) {
            faults.push((length, format!("{opened:?}")));
        } else if fs::read(&path).unwrap() != whole[..length] {
            faults.push((length, "changed".into()));
        }
    }
    assert!(faults.is_empty(), "of {} bytes: {faults:?}", whole.len());
    fs::write(&path, &whole).unwrap();
    assert_eq!(open_notes(&path), Opened::Right);
}

// What a crash leaves.

#[test]
fn a_vault_that_a_crash_left_opens_with_every_answered_hit() {
    let (directory, path) = place();
    let left = directory.path().join("left.redb");
    let running = limiter(hits(&path));
    for count in 1..=20 {
        assert_eq!(hit(&running), count);
        // What the file holds now is what a crash would leave.
        fs::copy(&path, &left).unwrap();
        assert_eq!(count_hits(&left), count);
    }
}

#[test]
fn what_a_crash_of_somebody_else_left_is_refused_unchanged() {
    let (directory, path) = place();
    let left = directory.path().join("left.redb");
    let database = foreign_database(&path);
    fs::copy(&path, &left).unwrap();
    drop(database);
    let error = refused(hits(&left), &left);
    assert!(matches!(error, Error::NotAVault { .. }), "{error:?}");
}

#[test]
fn what_a_crash_of_a_newer_version_left_is_refused_unchanged() {
    let (directory, path) = place();
    let left = directory.path().join("left.redb");
    let database = newer_database(&path);
    fs::copy(&path, &left).unwrap();
    drop(database);
    let error = refused(hits(&left), &left);
    assert!(matches!(error, Error::NewerFormat { .. }), "{error:?}");
}

#[test]
fn a_table_of_another_kind_that_a_crash_left_is_refused_unchanged() {
    let (directory, path) = place();
    let left = directory.path().join("left.redb");
    let running = counts(&path).open().unwrap();
    fs::copy(&path, &left).unwrap();
    drop(running);
    let error = refused(hits(&left), &left);
    assert!(matches!(error, Error::WrongKind { .. }), "{error:?}");
}

#[test]
fn a_truncated_vault_that_a_crash_left_is_whole_or_refused_unchanged() {
    let (directory, path) = place();
    let left = directory.path().join("left.redb");
    let running = notes(&path).open().unwrap();
    for (key, value) in (0..NOTES).map(note) {
        running.put(&key, value, DAY).unwrap();
    }
    let whole = fs::read(&path).unwrap();
    drop(running);
    let mut faults = Vec::new();
    for length in (512..=whole.len()).step_by(512) {
        fs::write(&left, &whole[..length]).unwrap();
        let opened = open_notes(&left);
        match opened {
            Opened::Right => {}
            Opened::Refused("not a vault" | "corrupt")
                if fs::read(&left).unwrap() == whole[..length] => {}
            _ => faults.push((length, opened)),
        }
    }
    assert!(faults.is_empty(), "of {} bytes: {faults:?}", whole.len());
    fs::write(&left, &whole).unwrap();
    assert_eq!(open_notes(&left), Opened::Right);
}

// Modes.

#[test]
fn a_file_can_change_between_exclusive_and_shared() {
    let (_directory, path) = place();
    for count in [1, 3, 5] {
        let exclusive = limiter(hits(&path).exclusive().lock_timeout(Duration::ZERO));
        assert_eq!(hit(&exclusive), count);
        exclusive.vault().close().unwrap();
        let shared = limiter(hits(&path).lock_timeout(Duration::ZERO));
        assert_eq!(hit(&shared), count + 1);
        shared.vault().close().unwrap();
    }
}

#[test]
fn others_may_read_while_a_vault_is_open_unless_it_is_exclusive() {
    let (_directory, path) = place();
    let read = || {
        let mut builder = redb::Database::builder();
        builder.set_concurrency_mode(redb::ConcurrencyMode::SingleWriter);
        builder.open_read_only(&path)
    };
    let shared = limiter(hits(&path));
    assert_eq!(hit(&shared), 1);
    let database = read().unwrap();
    let txn = redb::ReadableDatabase::begin_read(&database).unwrap();
    let stamps = txn.open_table(STAMPS).unwrap();
    assert_eq!(stamps.get("format").unwrap().unwrap().value(), "1");
    drop((stamps, txn, database));
    drop(shared);
    let exclusive = limiter(hits(&path).exclusive());
    assert!(read().is_err());
    assert_eq!(hit(&exclusive), 2);
}

#[test]
fn a_vault_opens_while_others_read() {
    let (_directory, path) = place();
    closed_vault(&path);
    let mut builder = redb::Database::builder();
    builder.set_concurrency_mode(redb::ConcurrencyMode::SingleWriter);
    let reader = builder.open_read_only(&path).unwrap();
    let txn = redb::ReadableDatabase::begin_read(&reader).unwrap();
    let exclusive = hits(&path).exclusive().lock_timeout(Duration::ZERO).open();
    assert!(
        matches!(exclusive, Err(Error::Locked { .. })),
        "{exclusive:?}"
    );
    let shared = limiter(hits(&path).lock_timeout(Duration::ZERO));
    assert_eq!(hit(&shared), 2);
    let stamps = txn.open_table(STAMPS).unwrap();
    assert_eq!(stamps.get("format").unwrap().unwrap().value(), "1");
}

// Two processes.

/// Where another process finds the vault.
const CHILD: &str = "RATEVAULT_TEST_VAULT";

/// Another process, run through one of the ignored tests below. It speaks on standard error, which
/// the test harness leaves alone.
struct Other {
    process: Child,
    speech: BufReader<ChildStderr>,
}

impl Other {
    fn new(role: &str, path: &Path) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--ignored", "--nocapture"])
            .arg(format!("opening::{role}"))
            .env(CHILD, path)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let speech = BufReader::new(process.stderr.take().unwrap());
        Self { process, speech }
    }

    /// One that has opened the vault.
    fn holding(role: &str, path: &Path) -> Self {
        let mut other = Self::new(role, path);
        assert_eq!(other.hear(), "open");
        other
    }

    fn hear(&mut self) -> String {
        let mut line = String::new();
        self.speech.read_line(&mut line).unwrap();
        line.trim_end().into()
    }

    fn tell(&mut self) {
        let input = self.process.stdin.as_mut().unwrap();
        input.write_all(b"go on\n").unwrap();
    }

    /// Has it make a hit; how many there are now.
    fn hit(&mut self) -> u32 {
        self.tell();
        self.hear().parse().unwrap()
    }

    /// Has it leave, and waits until it has.
    fn leave(mut self) {
        self.ask_to_leave();
        let status = self.process.wait().unwrap();
        assert!(status.success(), "{status}");
    }

    fn ask_to_leave(&mut self) {
        drop(self.process.stdin.take());
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The vault that this process is to open, if it is another process.
fn given() -> Option<VaultBuilder<HitLog>> {
    Some(hits(Path::new(&std::env::var_os(CHILD)?)))
}

fn say(what: impl std::fmt::Display) {
    let mut speech = io::stderr().lock();
    writeln!(speech, "{what}").unwrap();
}

/// Makes a hit whenever it is told to; when nobody can tell it any more, some hits and an end.
fn hold(vault: VaultBuilder<HitLog>) {
    let limiter = limiter(vault);
    say("open");
    for _ in io::stdin().lines() {
        say(hit(&limiter));
    }
    for _ in 0..LAST_HITS {
        hit(&limiter);
    }
    limiter.vault().close().unwrap();
}

/// Hits that keep a process busy while another one waits for its lock.
const LAST_HITS: u32 = 50;

#[test]
#[ignore = "a process of other tests"]
fn holds() {
    if let Some(vault) = given() {
        hold(vault);
    }
}

#[test]
#[ignore = "a process of other tests"]
fn holds_in_memory() {
    let flush_every = Duration::from_millis(1);
    if let Some(vault) = given() {
        hold(vault.durability(Durability::Buffered { flush_every }));
    }
}

#[test]
#[ignore = "a process of other tests"]
fn holds_exclusively() {
    if let Some(vault) = given() {
        hold(vault.exclusive());
    }
}

#[test]
#[ignore = "a process of other tests"]
fn hammers() {
    let Some(vault) = given() else { return };
    let limiter = limiter(vault);
    for client in (0..CLIENTS).cycle() {
        let decision = limiter.check("login", &client.to_string()).unwrap();
        say(format_args!("{client} {}", LIMIT - decision.remaining()));
    }
}

const CLIENTS: usize = 7;

fn assert_locked(path: &Path, vault: VaultBuilder<HitLog>, timeout: Duration) {
    let error = vault.lock_timeout(timeout).open().unwrap_err();
    let text = error.to_string();
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains("stop that process"), "{text}");
    match error {
        Error::Locked {
            path: named,
            waited,
        } => {
            assert_eq!(named, path);
            assert_eq!(waited, timeout);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_second_writing_process_is_locked_out_and_the_first_unharmed() {
    let (_directory, path) = place();
    let mut other = Other::holding("holds", &path);
    assert_eq!(other.hit(), 1);
    for timeout in [Duration::ZERO, Duration::from_millis(30)] {
        assert_locked(&path, hits(&path), timeout);
        assert_locked(&path, hits(&path).exclusive(), timeout);
    }
    assert_eq!(other.hit(), 2);
    other.leave();
    assert_eq!(count_hits(&path), 2 + LAST_HITS);
}

#[test]
fn an_exclusive_process_locks_every_other_out() {
    let (_directory, path) = place();
    let mut other = Other::holding("holds_exclusively", &path);
    assert_eq!(other.hit(), 1);
    assert_locked(&path, hits(&path), Duration::ZERO);
    assert_locked(&path, hits(&path).exclusive(), Duration::ZERO);
    assert_eq!(other.hit(), 2);
    other.leave();
    assert_eq!(count_hits(&path), 2 + LAST_HITS);
}

#[test]
fn a_process_that_waits_is_let_in_when_the_first_one_leaves() {
    for role in ["holds", "holds_exclusively"] {
        let (_directory, path) = place();
        let mut other = Other::holding(role, &path);
        assert_locked(&path, hits(&path), Duration::ZERO);
        thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let limiter = try_limiter(hits(&path).lock_timeout(PATIENCE));
                hits_of(&limiter.unwrap(), "ada")
            });
            // It leaves after some more hits; every one is there when the other is let in.
            other.ask_to_leave();
            assert_eq!(waiting.join().unwrap(), LAST_HITS);
        });
        other.leave();
    }
}

#[test]
fn the_lock_of_a_process_that_was_killed_keeps_nobody_waiting() {
    for role in ["holds", "holds_exclusively", "holds_in_memory"] {
        let (_directory, path) = place();
        let mut other = Other::holding(role, &path);
        for number in 1..=3 {
            assert_eq!(other.hit(), number);
        }
        assert_locked(&path, hits(&path), Duration::ZERO);
        other.process.kill().unwrap();
        other.process.wait().unwrap();
        // The first try, and every hit that was on disk.
        let limiter = limiter(hits(&path).lock_timeout(Duration::ZERO));
        let found = hits_of(&limiter, "ada");
        match role {
            "holds_in_memory" => assert!(found <= 3, "{found}"),
            _ => assert_eq!(found, 3, "{role}"),
        }
        assert_eq!(hit(&limiter), found + 1);
    }
}

#[test]
fn a_process_that_is_killed_leaves_every_answered_hit() {
    let (directory, path) = place();
    let mut total = [0; CLIENTS];
    for round in 1..=3 {
        let mut other = Other::new("hammers", &path);
        let mut said = 0;
        loop {
            let line = other.hear();
            let Some((client, count)) = line.split_once(' ') else {
                assert_eq!(line, "", "round {round}");
                break;
            };
            total[client.parse::<usize>().unwrap()] = count.parse().unwrap();
            said += 1;
            if said == 40 * round {
                other.process.kill().unwrap();
            }
        }
        assert!(said >= 40 * round);
        // One more check may have been on disk and not yet answered.
        let limiter = limiter(hits(&path));
        let mut unanswered = 0;
        for (client, total) in total.iter_mut().enumerate() {
            let found = hits_of(&limiter, &client.to_string());
            assert!(found >= *total, "{client}: {found} of {total}");
            unanswered += found - *total;
            *total = found;
        }
        assert!(unanswered <= 1, "{unanswered}");
        limiter.vault().close().unwrap();
        assert_eq!(names(directory.path()), ["vault.redb"]);
    }
}
