//! What a check costs: on disk beside the bare redb transaction, and as arithmetic; and what it
//! costs to sweep rows away.
//!
//! The files are in a directory of their own in `target/`, which is removed at the end. A commit
//! waits for the disk, and disks differ: compare figures of one run only.
#![expect(
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a benchmark has no caller that could handle an error, and prints its figures"
)]

use std::cell::LazyCell;
use std::fmt;
use std::fs::{self, File};
use std::hint::black_box;
use std::net::Ipv4Addr;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, SamplingMode, Throughput};
use ratevault::{
    Algorithm, Clock, FixedWindow, HitLog, Key, Limiter, ManualClock, Quota, Result, Row,
    SlidingWindow, SystemClock, Timestamp, Vault,
};
use redb::{ConcurrencyMode, Database, ReadableTable, TableDefinition};
use tempfile::TempDir;

const TABLE: &str = "limits";
const ENDPOINT: &str = "login";
const HOUR: Duration = Duration::from_secs(3_600);
const MINUTE_MS: u64 = 60_000;

type Group<'c> = BenchmarkGroup<'c, WallTime>;

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    committed_check(&mut criterion);
    decide(&mut criterion);
    sweep(&mut criterion);
    criterion.final_summary();
}

/// How many threads check at once, and how many rows the table has.
#[derive(Clone, Copy)]
struct Load {
    callers: u64,
    keys: u32,
}

/// `64x100000`.
impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.callers, self.keys)
    }
}

/// One check that is answered and on disk: through the vault, and as a bare redb transaction.
///
/// Both start from a copy of one file, so that the trees and the rows are the same, and both check
/// the same clients in the same order, all of which have a row. The figure is the wall time by the
/// checks of all callers together.
fn committed_check(criterion: &mut Criterion) {
    let folder = folder();
    let mut group = criterion.benchmark_group("committed_check");
    group
        .throughput(Throughput::Elements(1))
        .sampling_mode(SamplingMode::Flat)
        .sample_size(20)
        .warm_up_time(Duration::from_secs(1))
        .measurement_time(Duration::from_secs(5));
    for (callers, keys) in [(1, 1_000), (1, 100_000), (1, 1_000_000), (64, 100_000)] {
        let load = Load { callers, keys };
        ours(&mut group, folder.path(), load);
        redb_transaction(&mut group, folder.path(), load);
        if everything_is_asked_for() {
            ratio(folder.path(), load);
        }
    }
    group.finish();
}

/// Whether no benchmark is filtered out and this is no dry run.
fn everything_is_asked_for() -> bool {
    std::env::args()
        .skip(1)
        .all(|argument| argument == "--bench")
}

/// Prints how the two compare when they take turns: the disk is faster in one minute than in the
/// next, so that figures measured one after the other do not compare.
fn ratio(folder: &Path, load: Load) {
    const ROUNDS: usize = 60;
    let limiter = limiter(&fresh_copy(folder, load.keys, "ours"));
    let database = database(&fresh_copy(folder, load.keys, "bare"));
    let (draws, bare_draws) = (Draws::new(load.keys), Draws::new(load.keys));
    let checks = 40.max(load.callers * 20);
    let bare_checks = 40.max(load.callers * 5);
    let round = |_| {
        let ours = time(load.callers, checks, || check(&limiter, draws.next()));
        let bare = time(load.callers, bare_checks, || {
            renew(&database, bare_draws.next())
        });
        ours.as_secs_f64() / checks as f64 / (bare.as_secs_f64() / bare_checks as f64)
    };
    let mut ratios: Vec<f64> = (0..ROUNDS).map(round).collect();
    ratios.sort_by(f64::total_cmp);
    let at = |part: usize| ratios.get(ROUNDS * part / 4).copied().unwrap_or(f64::NAN);
    println!(
        "committed_check/ratio/{load}    ours / redb_transaction, in turns: {:.3} (quartiles {:.3} and {:.3})",
        at(2),
        at(1),
        at(3)
    );
}

fn ours(group: &mut Group<'_>, folder: &Path, load: Load) {
    // Lazy: a benchmark that the command line filters out makes no file.
    let limiter = LazyCell::new(|| limiter(&fresh_copy(folder, load.keys, "copy")));
    let draws = Draws::new(load.keys);
    group.bench_function(BenchmarkId::new("ours", load), |bencher| {
        let limiter: &Limiter<_> = &limiter;
        bencher.iter_custom(|checks| time(load.callers, checks, || check(limiter, draws.next())));
    });
}

fn redb_transaction(group: &mut Group<'_>, folder: &Path, load: Load) {
    let database = LazyCell::new(|| database(&fresh_copy(folder, load.keys, "copy")));
    let draws = Draws::new(load.keys);
    group.bench_function(BenchmarkId::new("redb_transaction", load), |bencher| {
        let database: &Database = &database;
        bencher.iter_custom(|checks| time(load.callers, checks, || renew(database, draws.next())));
    });
}

/// The wall time of `checks` checks that `callers` threads share, from when all of them are ready
/// until the last has its last answer.
fn time(callers: u64, checks: u64, check: impl Fn() + Sync) -> Duration {
    let callers_and_us = usize::try_from(callers + 1).expect("few callers");
    let barrier = Barrier::new(callers_and_us);
    let started = thread::scope(|scope| {
        for caller in 0..callers {
            let share = checks / callers + u64::from(caller < checks % callers);
            let (barrier, check) = (&barrier, &check);
            scope.spawn(move || {
                barrier.wait();
                barrier.wait();
                (0..share).for_each(|_| check());
            });
        }
        barrier.wait();
        // Before they are let go: afterwards, a thread of theirs may run before this one does.
        let started = Instant::now();
        barrier.wait();
        started
    });
    started.elapsed()
}

/// A check as an application makes it, on a vault with default settings.
///
/// Each writes a row, one that is refused too, because refusals count by default.
fn check(limiter: &Limiter<SlidingWindow>, client: Ipv4Addr) {
    black_box(limiter.check(ENDPOINT, client)).expect("a decision");
}

/// The least that redb has to do for such a check: one durable transaction that reads the row of
/// the client and writes one of the same size.
///
/// No row is decoded and no clock is read. The deadline index is not opened: a client that has a
/// row keeps its entry there. Callers wait for each other, as redb writes one transaction at a time.
fn renew(database: &Database, client: Ipv4Addr) {
    const ROWS: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("rows:limits");
    let key = encoded_key(client);
    let renewed = || -> Result<(), redb::Error> {
        let txn = database.begin_write()?;
        let mut rows = txn.open_table(ROWS)?;
        let row = rows.get(&*key)?.map(|row| row.value().to_vec());
        let mut row = row.expect("a row of every client");
        // Any other content will do: it is never read as a row again.
        row.reverse();
        rows.insert(&*key, &*row)?;
        drop(rows);
        Ok(txn.commit()?)
    };
    renewed().expect("a commit");
}

/// The bytes that a vault stores this client's key as.
fn encoded_key(client: Ipv4Addr) -> Vec<u8> {
    [&b"\x01\x00\x05login\x02\x00\x04"[..], &client.octets()].concat()
}

fn limiter(path: &Path) -> Limiter<SlidingWindow> {
    let vault = Vault::builder(TABLE).path(path).open().expect("a vault");
    Limiter::new(vault, ten_per_hour())
}

/// The database as a vault opens it: it is verified as well, because that fills the cache.
fn database(path: &Path) -> Database {
    Database::builder()
        .set_cache_size(16 << 20)
        .set_concurrency_mode(ConcurrencyMode::SingleWriter)
        .set_check_integrity_on_open(true)
        .create(path)
        .expect("a database")
}

fn ten_per_hour() -> SlidingWindow {
    Quota::per_hour(10)
        .and_then(SlidingWindow::new)
        .expect("a limit")
}

/// A copy of a vault file of `keys` rows, which is made when it is asked for first.
fn fresh_copy(folder: &Path, keys: u32, name: &str) -> PathBuf {
    let original = folder.join(format!("{keys}.redb"));
    if !original.exists() {
        fill_file(&original, keys);
    }
    let copy = folder.join(format!("{name}.redb"));
    fs::copy(&original, &copy).expect("a copy");
    // Else the first commits would pay for it.
    let synced = File::open(&copy).and_then(|copy| copy.sync_all());
    synced.expect("a copy on disk");
    copy
}

/// Rows of clients that have made 5 checks of the 10 that they have.
fn fill_file(path: &Path, keys: u32) {
    let limiter = limiter(path);
    let window = limiter.algorithm();
    let now = SystemClock.now();
    let mut log = HitLog::default();
    for minutes_ago in [50, 40, 30, 20, 10] {
        let hit = now.as_millis() - minutes_ago * MINUTE_MS;
        window.decide(&mut log, Timestamp::from_millis(hit), 1);
    }
    fill(limiter.vault(), 0..keys, &log, window.ttl()).expect("a full table");
    assert_eq!(limiter.vault().len().expect("a count"), u64::from(keys));
}

/// Stores `value` for all clients of `numbers`.
fn fill<V: Row + Clone>(
    vault: &Vault<V>,
    numbers: Range<u32>,
    value: &V,
    ttl: Duration,
) -> Result<()> {
    for number in numbers {
        let value = value.clone();
        let key = Key::new(ENDPOINT, client(number))?;
        // Queued from here on, whether or not it is awaited: a full table counts its rows.
        drop(vault.update_async(&key, move |slot| slot.put(value, ttl)));
        if number % 10_000 == 9_999 {
            vault.flush()?;
        }
    }
    vault.flush()
}

/// Clients with successive numbers are far apart in the table, as they are when people come.
fn client(number: u32) -> Ipv4Addr {
    // Odd, so that no two share an address.
    Ipv4Addr::from_bits(number.wrapping_mul(0x9e37_79b1))
}

/// Clients at random, the same ones in every benchmark, and never the same ones in two samples.
struct Draws {
    clients: u64,
    drawn: AtomicU64,
}

impl Draws {
    fn new(clients: u32) -> Self {
        Self {
            clients: clients.into(),
            drawn: AtomicU64::new(0),
        }
    }

    fn next(&self) -> Ipv4Addr {
        let number = mix(self.drawn.fetch_add(1, Ordering::Relaxed)) % self.clients;
        client(u32::try_from(number).expect("there are no more clients than a u32 counts"))
    }
}

/// The output function of SplitMix64.
fn mix(state: u64) -> u64 {
    let state = state.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}

/// The algorithm alone, on the state of a client that comes as often as it may: each check is
/// admitted, and one hit is over by then.
fn decide(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("decide");
    group
        .throughput(Throughput::Elements(1))
        .warm_up_time(Duration::from_secs(1))
        .measurement_time(Duration::from_secs(3));
    for limit in [5, 10_000] {
        group.bench_function(BenchmarkId::new("sliding", limit), |bencher| {
            let window = SlidingWindow::new(one_per_second(limit)).expect("a limit");
            let mut check = steady(&window, limit);
            bencher.iter(&mut check);
        });
    }
    group.bench_function(BenchmarkId::new("fixed", 5), |bencher| {
        let window = FixedWindow::new(one_per_second(5));
        let mut check = steady(&window, 5);
        bencher.iter(&mut check);
    });
    group.finish();
}

fn one_per_second(limit: u32) -> Quota {
    Quota::new(limit, Duration::from_secs(limit.into())).expect("a quota")
}

/// Decides a check per second, after so many that the quota is used up.
fn steady<A: Algorithm>(algorithm: &A, limit: u32) -> impl FnMut() {
    let mut state = A::State::default();
    let mut now = 0;
    let mut check = move || {
        now += 1_000;
        let verdict = algorithm.decide(&mut state, Timestamp::from_millis(now), 1);
        assert!(black_box(verdict).decision.is_allowed());
    };
    (0..limit).for_each(|_| check());
    check
}

const EXPIRED: u32 = 100_000;

/// Sweeping a file whose rows have all expired, until they are gone from the disk.
///
/// The rows that are due together are spread over the table, as they are when people come.
fn sweep(criterion: &mut Criterion) {
    let folder = folder();
    let mut group = criterion.benchmark_group("sweep");
    group
        .throughput(Throughput::Elements(EXPIRED.into()))
        .sampling_mode(SamplingMode::Flat)
        .sample_size(10)
        .warm_up_time(Duration::from_millis(1))
        .measurement_time(Duration::from_secs(15));
    group.bench_function(EXPIRED.to_string(), |bencher| {
        let clock = Arc::new(ManualClock::new(Timestamp::from_millis(0)));
        let vault = Vault::builder(TABLE)
            .path(folder.path().join("sweep.redb"))
            .clock(clock.clone())
            .background_sweep(false)
            .open()
            .expect("a vault");
        bencher.iter_custom(|sweeps| (0..sweeps).map(|_| time_sweep(&vault, &clock)).sum());
    });
    group.finish();
}

fn time_sweep(vault: &Vault<HitLog>, clock: &ManualClock) -> Duration {
    let mut log = HitLog::default();
    ten_per_hour().decide(&mut log, Timestamp::from_millis(0), 1);
    for first in (0..EXPIRED).step_by(1_000) {
        fill(vault, first..first + 1_000, &log, HOUR).expect("a full table");
        clock.advance(Duration::from_millis(1));
    }
    clock.advance(HOUR);
    let started = Instant::now();
    let swept = vault.sweep().expect("a sweep");
    let elapsed = started.elapsed();
    assert_eq!(swept, u64::from(EXPIRED));
    elapsed
}

/// A new directory in `target/`: on a disk, unlike the system's temporary directory on many
/// systems.
fn folder() -> TempDir {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("target");
    fs::create_dir_all(&target).expect("the target directory");
    tempfile::Builder::new()
        .prefix("bench-")
        .tempdir_in(target)
        .expect("a directory")
}
