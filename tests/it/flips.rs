//! One flipped bit anywhere in a vault's file: whoever opens it or looks into it is told, or every
//! row is there and right.
//!
//! `RATEVAULT_FLIPS` sets how many bits are flipped, one at a time, and `RATEVAULT_SEED` which.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread;
use std::time::Duration;

use ratevault::{
    Algorithm, Clock, Decision, Entry, Error, FixedWindow, Key, Limiter, ManualClock, Quota,
    SlidingWindow, Snapshot, State, Timestamp, Vault,
};

use crate::support::desk::Desk;
use crate::support::faulty::Faulty;
use crate::support::{SECOND, manual_clock, single_threaded};

const CLIENTS: u64 = 30;

/// Long enough for any machine, however busy: whoever takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(600);

// What is in the file.

/// Logins counted by a sliding window and uploads by a fixed one, in tables of their own.
struct Limiters {
    logins: Limiter<SlidingWindow>,
    uploads: Limiter<FixedWindow>,
}

impl Limiters {
    fn open(storage: &Arc<Faulty>, clock: &Arc<ManualClock>) -> Result<Self, Error> {
        let logins = Vault::builder("logins").storage(Arc::clone(storage));
        let logins = logins.clock(clock.clone()).background_sweep(false).open()?;
        let uploads = Vault::builder("uploads").storage(Arc::clone(storage));
        let window = SlidingWindow::new(Quota::per_hour(5)?)?;
        Ok(Self {
            logins: Limiter::new(logins, window),
            uploads: Limiter::new(uploads.open()?, FixedWindow::new(Quota::per_day(9)?)),
        })
    }

    fn hit(&self, clock: &ManualClock) {
        for client in 0..CLIENTS {
            for _ in 0..=client % 7 {
                clock.advance(SECOND);
                let client = client.to_string();
                self.logins.check("login", &client).unwrap();
                self.uploads.check("upload", &client).unwrap();
            }
        }
    }

    fn answers(&self) -> Vec<Result<Decision, Error>> {
        let mut answers = answers(&self.logins, "login");
        answers.extend(self::answers(&self.uploads, "upload"));
        answers
    }
}

/// What is answered for each client, and for one that is new: first by a look, then by a check.
fn answers<A: Algorithm>(limiter: &Limiter<A>, endpoint: &str) -> Vec<Result<Decision, Error>> {
    let clients = || (0..=CLIENTS).map(|client| client.to_string());
    let mut answers: Vec<_> = clients()
        .map(|client| limiter.peek(endpoint, &client))
        .collect();
    // Asked at once, so that they share a transaction.
    let checks: Vec<_> = clients()
        .map(|client| limiter.check_async(endpoint, &client))
        .collect();
    let runtime = single_threaded();
    answers.extend(checks.into_iter().map(|check| runtime.block_on(check)));
    answers
}

type Rows = BTreeMap<(String, Key), Entry<State>>;

/// A vault's file that was closed cleanly, and what is read from it.
struct Whole {
    bytes: Vec<u8>,
    /// When its clock stopped.
    now: Timestamp,
    answers: Vec<Decision>,
    rows: Rows,
}

impl Whole {
    fn new() -> Self {
        let (storage, clock) = (Arc::new(Faulty::default()), manual_clock());
        let limiters = Limiters::open(&storage, &clock).unwrap();
        limiters.hit(&clock);
        drop(limiters);
        let bytes = storage.durable_image();
        let answers = Limiters::open(&storage, &clock).unwrap().answers();
        let desk = Desk::new();
        let rows = read(&desk.path("vault.redb"), &bytes).unwrap();
        assert_eq!(rows.1, 0);
        assert_eq!(rows.0.len() as u64, 2 * CLIENTS);
        Self {
            bytes,
            now: clock.now(),
            answers: answers.into_iter().map(Result::unwrap).collect(),
            rows: rows.0,
        }
    }

    /// Whether it had this row, or it is one of an unknown kind.
    fn has(&self, key: &(String, Key), row: &Entry<State>) -> bool {
        let had = self.rows.get(key);
        had.is_some_and(|had| {
            had == row || is_unknown(&row.value) && had.expires_at == row.expires_at
        })
    }

    fn flipped(&self, flip: Flip) -> Vec<u8> {
        let mut bytes = self.bytes.clone();
        bytes[flip.place] ^= 1 << flip.bit;
        bytes
    }
}

const fn is_unknown(state: &State) -> bool {
    !matches!(state, State::SlidingLog(_) | State::FixedWindow(_))
}

/// The rows of a file that are whole, and how many are not.
fn read(path: &Path, bytes: &[u8]) -> Result<(Rows, usize), Error> {
    fs::write(path, bytes).unwrap();
    let snapshot = Snapshot::builder(path)
        .lock_timeout(Duration::ZERO)
        .open()?;
    let (mut rows, mut damaged) = (Rows::new(), 0);
    for table in snapshot.tables()? {
        for row in snapshot.rows(&table.name)? {
            match row {
                Ok(row) => {
                    let key = (table.name.clone(), row.key.clone());
                    assert!(rows.insert(key, row).is_none(), "a row came twice");
                }
                Err(Error::CorruptRow { .. }) => damaged += 1,
                Err(error) => return Err(error),
            }
        }
    }
    Ok((rows, damaged))
}

// What is flipped, and what comes of it.

#[derive(Clone, Copy, Debug)]
struct Flip {
    place: usize,
    bit: usize,
}

/// What comes of a flip. `NotSeen` is the fault: a row is missing or another one, and nobody is told.
/// `OtherKind`: the table is said to be of a kind that nobody knows; its rows are whole, as bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Outcome {
    Refused,
    CorruptRow,
    OtherKind,
    Harmless,
    NotSeen,
}

/// A sequence that looks random and is always the same (splitmix64).
fn random(mut seed: u64) -> impl FnMut(usize) -> usize {
    move |below| {
        seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = seed;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) as usize % below
    }
}

fn from_environment(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |number| number.parse().unwrap())
}

/// Keeps what the storage engine's panics print from the figures: the library turns them into errors.
fn quiet_storage() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let others = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let file = panic.location().map_or("", |location| location.file());
            if !file.contains("redb-") {
                others(panic);
            }
        }));
    });
}

/// Tries one in `every` of the flips, and prints what came of them; says which were not seen.
fn flip(every: u64, who: &str, attempt: impl Fn(&Whole, Flip) -> Outcome + Send + Sync + 'static) {
    let seed = from_environment("RATEVAULT_SEED", 1);
    let count = from_environment("RATEVAULT_FLIPS", 400) / every;
    quiet_storage();
    let whole = Whole::new();
    let mut random = random(seed);
    let flips: Arc<[Flip]> = (0..count)
        .map(|_| Flip {
            place: random(whole.bytes.len()),
            bit: random(8),
        })
        .collect();
    let length = whole.bytes.len();
    let (work, next) = (Arc::new((whole, attempt)), Arc::new(AtomicUsize::new(0)));
    let (outcomes, answers) = mpsc::channel();
    for _ in 0..2 {
        let (flips, work, next) = (Arc::clone(&flips), Arc::clone(&work), Arc::clone(&next));
        let outcomes = outcomes.clone();
        thread::spawn(move || {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let Some(flip) = flips.get(number) else { break };
                let (whole, attempt) = &*work;
                if outcomes.send((number, attempt(whole, *flip))).is_err() {
                    break;
                }
            }
        });
    }
    drop(outcomes);
    let (mut counts, mut not_seen) = (BTreeMap::new(), Vec::<Flip>::new());
    let mut waiting: BTreeMap<usize, &Flip> = flips.iter().enumerate().collect();
    for _ in 0..count {
        let Ok((number, outcome)) = answers.recv_timeout(PATIENCE) else {
            let begun = next.load(Ordering::Relaxed);
            waiting.retain(|number, _| *number < begun);
            panic!("whoever tries one of these hangs or panicked: {waiting:?}");
        };
        *counts.entry(outcome).or_insert(0) += 1;
        let flip = waiting.remove(&number);
        if outcome == Outcome::NotSeen {
            not_seen.extend(flip);
        }
    }
    let of = |outcome| counts.get(&outcome).copied().unwrap_or(0);
    println!(
        "{who}, seed {seed}, a file of {length} bytes: flips: {count}, refused: {}, \
         seen as corrupt row: {}, seen as unknown kind: {}, harmless: {}, not seen: {}",
        of(Outcome::Refused),
        of(Outcome::CorruptRow),
        of(Outcome::OtherKind),
        of(Outcome::Harmless),
        of(Outcome::NotSeen),
    );
    assert!(not_seen.is_empty(), "{not_seen:?}");
    // Some hit something, unless they are too few.
    assert!(count < 100 || of(Outcome::Refused) > 0, "{counts:?}");
}

#[test]
fn after_a_flipped_bit_every_answer_is_right_or_an_error() {
    flip(1, "open, peek, check", |whole, flip| {
        let storage = Arc::new(Faulty::with_image(whole.flipped(flip)));
        let clock = Arc::new(ManualClock::new(whole.now));
        let limiters = match Limiters::open(&storage, &clock) {
            Ok(limiters) => limiters,
            Err(error) => {
                assert_eq!(error.to_string().lines().count(), 1, "{flip:?}: {error}");
                return Outcome::Refused;
            }
        };
        let mut outcome = Outcome::Harmless;
        for (answer, right) in limiters.answers().iter().zip(&whole.answers) {
            match answer {
                Ok(decision) if decision == right => {}
                Ok(_) => return Outcome::NotSeen,
                Err(_) => outcome = Outcome::CorruptRow,
            }
        }
        outcome
    });
}

#[test]
fn after_a_flipped_bit_no_changed_or_missing_row_is_shown_as_healthy() {
    flip(1, "snapshot", |whole, flip| {
        let desk = Desk::new();
        match read(&desk.path("vault.redb"), &whole.flipped(flip)) {
            Err(_) => Outcome::Refused,
            Ok((rows, damaged)) if rows.len() + damaged < whole.rows.len() => Outcome::NotSeen,
            Ok((rows, _)) if rows.iter().any(|(key, row)| !whole.has(key, row)) => Outcome::NotSeen,
            Ok((rows, _)) if rows.values().any(|row| is_unknown(&row.value)) => Outcome::OtherKind,
            Ok((_, 0)) => Outcome::Harmless,
            Ok(_) => Outcome::CorruptRow,
        }
    });
}

#[test]
fn after_a_flipped_bit_dump_ends_and_tells_of_what_it_does_not_show() {
    let right = OnceLock::new();
    flip(8, "dump", move |whole, flip| {
        let desk = Desk::new();
        let dump = |bytes: &[u8]| {
            fs::write(desk.path("ratevault.redb"), bytes).unwrap();
            desk.dump(&["--json"])
        };
        let right = right.get_or_init(|| dump(&whole.bytes).printed(0));
        let shown = dump(&whole.flipped(flip));
        let right: BTreeSet<&str> = right.lines().collect();
        assert_eq!(right.len(), whole.rows.len());
        let (damaged, healthy): (Vec<_>, Vec<_>) = shown
            .out
            .lines()
            .partition(|line| line.contains("\"error\""));
        let (unknown, healthy): (Vec<_>, Vec<_>) = healthy
            .into_iter()
            .partition(|line| line.contains("\"hits\":null"));
        let lines = damaged.len() + unknown.len() + healthy.len();
        match shown.code {
            _ if healthy.iter().any(|line| !right.contains(line)) => Outcome::NotSeen,
            Some(0) if lines < right.len() || !damaged.is_empty() => Outcome::NotSeen,
            Some(0) if !unknown.is_empty() => Outcome::OtherKind,
            Some(0) => Outcome::Harmless,
            Some(3) if !damaged.is_empty() => Outcome::CorruptRow,
            Some(3) => Outcome::Refused,
            _ => panic!("{flip:?}: {shown:?}"),
        }
    });
}
