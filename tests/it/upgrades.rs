//! A file that an older version of the crate wrote: it is read, and counted on.
//!
//! `tests/fixtures/vault-1.redb` holds both kinds of tables, as version 0.1.0 left them when it was
//! closed. A version that writes another format commits a file of its own, and reads all of them.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ratevault::{
    Client, Clock, FixedWindow, Limiter, ManualClock, Quota, SlidingWindow, Snapshot, State,
    Timestamp, Vault,
};
use tempfile::TempDir;

use crate::support::file::Contents;
use crate::support::{START, manual_clock};

const FORMAT_1: &[u8] = include_bytes!("../fixtures/vault-1.redb");

/// How long after `START` each hit on `login` was, in ms, and by whom.
fn logins() -> [(Who, &'static [u64]); 5] {
    [
        (Who::Name("ada"), &[0, 250, 61_000]),
        (Who::Name("zoë\n\0"), &[70_000]),
        (
            Who::Address("203.0.113.7"),
            &[65_000, 70_000, 70_000, 70_000, 70_000, 71_000],
        ),
        (Who::Address("2001:db8::7"), &[71_000, 71_000]),
        (Who::Long, &[60_000, 71_000]),
    ]
}

#[derive(Clone, Copy, Debug)]
enum Who {
    Name(&'static str),
    Address(&'static str),
    /// More than a key holds.
    Long,
}

static LONG: [u8; 300] = [b'a'; 300];

impl Who {
    fn client(self) -> Client<'static> {
        match self {
            Self::Name(name) => name.into(),
            Self::Address(address) => address.parse::<IpAddr>().unwrap().into(),
            Self::Long => Client::from(&LONG),
        }
    }
}

/// When the last of these hits was.
const CLOSED_AT: u64 = START + 71_000;

fn open(path: &Path, clock: &Arc<ManualClock>) -> (Limiter<SlidingWindow>, Limiter<FixedWindow>) {
    let logins = Vault::builder("logins").path(path).clock(clock.clone());
    let logins = logins.background_sweep(false).open().unwrap();
    let uploads = Vault::builder("uploads").path(path).open().unwrap();
    (
        Limiter::new(logins, "5/minute; 100/day".parse().unwrap()),
        Limiter::new(uploads, FixedWindow::new(Quota::per_hour(9).unwrap())),
    )
}

/// A copy of the file that is committed.
fn copy() -> (TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vault.redb");
    fs::write(&path, FORMAT_1).unwrap();
    (directory, path)
}

#[test]
#[ignore = "writes the fixture of a new format, to $RATEVAULT_FIXTURE"]
fn write_the_fixture() {
    let path = PathBuf::from(std::env::var_os("RATEVAULT_FIXTURE").unwrap());
    let clock = manual_clock();
    let (limiter, uploads) = open(&path, &clock);
    let all = logins();
    let hits = all
        .iter()
        .flat_map(|(who, after)| after.iter().map(move |after| (after, who)));
    let mut hits: Vec<_> = hits.collect();
    hits.sort_by_key(|(after, _)| **after);
    for (after, who) in hits {
        clock.set(Timestamp::from_millis(START + after));
        limiter.check("login", who.client()).unwrap();
    }
    uploads.check_n("upload", "ada", 4).unwrap();
    uploads.check_n("upload", "bob", 9).unwrap();
    assert_eq!(clock.now().as_millis(), CLOSED_AT);
    limiter.vault().close().unwrap();
}

#[test]
fn a_file_of_format_1_shows_exactly_its_rows() {
    let (_directory, path) = copy();
    let snapshot = Snapshot::open(&path).unwrap();
    let rows = |table| snapshot.rows(table).unwrap().map(Result::unwrap);
    let mut expected = Vec::from(logins());
    for row in rows("logins") {
        let of = |(who, _): &(Who, _)| who.client() == row.key.client();
        let (_, after) = expected.remove(expected.iter().position(of).unwrap());
        let State::SlidingLog(log) = &row.value else {
            panic!("{row:?}");
        };
        let after: Vec<_> = after.iter().map(|after| START + after).collect();
        let times: Vec<_> = log.times().map(Timestamp::as_millis).collect();
        assert_eq!(times, after, "{}", row.key);
        assert_eq!(row.key.endpoint(), "login");
        let day = 86_400_000 + 1_000;
        assert_eq!(row.expires_at.as_millis(), after.last().unwrap() + day);
    }
    assert!(expected.is_empty(), "{expected:?}");
    let uploads = rows("uploads").map(|row| match row.value {
        State::FixedWindow(count) => (
            row.key.to_string(),
            count.used(),
            count.start().as_millis(),
            row.expires_at.as_millis(),
        ),
        other => panic!("{other:?}"),
    });
    let row = |key: &str, used| (key.to_owned(), used, CLOSED_AT, CLOSED_AT + 3_601_000);
    assert_eq!(
        uploads.collect::<Vec<_>>(),
        [row("upload/ada", 4), row("upload/bob", 9)]
    );
    drop(snapshot);
    for table in ["logins", "uploads"] {
        Contents::read(&path, table).check_invariant();
    }
}

#[test]
fn a_file_of_format_1_is_counted_on() {
    let (_directory, path) = copy();
    let clock = Arc::new(ManualClock::new(Timestamp::from_millis(CLOSED_AT)));
    let (limiter, uploads) = open(&path, &clock);
    // How many hits of the last minute there were, and what one more comes to.
    for (who, hits) in [(0, 1), (1, 1), (2, 5), (3, 2), (4, 2)] {
        let client = logins()[who].0.client();
        let decision = limiter.check("login", client).unwrap();
        assert_eq!(decision.is_allowed(), hits < 5, "{client}");
        assert_eq!(
            decision.remaining(),
            5_u32.saturating_sub(hits + 1),
            "{client}"
        );
    }
    assert_eq!(uploads.check_n("upload", "ada", 5).unwrap().remaining(), 0);
    assert!(!uploads.check("upload", "bob").unwrap().is_allowed());
    assert_eq!(uploads.check("upload", "eve").unwrap().remaining(), 8);
    limiter.vault().close().unwrap();

    // What the older version filed is swept by this one.
    for table in ["logins", "uploads"] {
        Contents::read(&path, table).check_invariant();
    }
    let (limiter, uploads) = open(&path, &clock);
    clock.set(Timestamp::from_millis(CLOSED_AT + 2 * 86_400_000));
    limiter.vault().sweep().unwrap();
    uploads.vault().sweep().unwrap();
    assert_eq!(
        (
            limiter.vault().len().unwrap(),
            uploads.vault().len().unwrap()
        ),
        (0, 0)
    );
}
