//! A process that is killed at a random moment: what it had answered, and what is there afterwards.
//!
//! `cargo test --test it -- --nocapture kills::` prints how many were killed and what that lost.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use ratevault::{Durability, HitLog, Limiter, Quota, Refusals, SlidingWindow, Vault};

use crate::support::file::Contents;

const KILLS: u64 = 100;
const THREADS: usize = 8;
const KEYS: usize = 40;

/// For how many kills the same clients go on: long enough for their limits to be reached.
const KILLS_OF_A_GENERATION: u64 = 10;

/// After how many hits of its own the one thread that flushes does so.
const HITS_BETWEEN_FLUSHES: usize = 5;

/// A process is killed after fewer completed flushes than these, and then fewer events.
const FLUSHES: u64 = 6;
const EVENTS: u64 = 200;

/// How a process hits.
#[derive(Clone, Copy, Debug)]
struct Role {
    test: &'static str,
    durability: Durability,
    limit: u32,
}

const IN_MEMORY: Role = Role {
    test: "hammers_in_memory",
    durability: Durability::Buffered {
        flush_every: Duration::from_millis(10),
    },
    limit: 1_000,
};

const ON_DISK: Role = Role {
    test: "hammers_on_disk",
    durability: Durability::Committed,
    limit: 50,
};

// The process that is killed.

const PATH: &str = "RATEVAULT_KILLS_PATH";
const GENERATION: &str = "RATEVAULT_KILLS_GENERATION";

#[test]
#[ignore = "a process of other tests"]
fn hammers_in_memory() {
    hammer(IN_MEMORY);
}

#[test]
#[ignore = "a process of other tests"]
fn hammers_on_disk() {
    hammer(ON_DISK);
}

fn limiter(path: &Path, role: Role) -> Limiter<SlidingWindow> {
    let vault = Vault::<HitLog>::builder("rate_limits").path(path);
    let window = SlidingWindow::new(Quota::per_day(role.limit).unwrap()).unwrap();
    let vault = vault.durability(role.durability).open().unwrap();
    Limiter::new(vault, window.refusals(Refusals::Ignore))
}

/// Says an event, in one piece: a line that is cut off by the kill is no line.
fn say(event: &str) {
    io::stderr()
        .lock()
        .write_all(format!("{event}\n").as_bytes())
        .unwrap();
}

fn hammer(role: Role) {
    let Some(path) = std::env::var_os(PATH) else {
        return;
    };
    let generation = std::env::var(GENERATION).unwrap();
    let limiter = limiter(Path::new(&path), role);
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (limiter, generation) = (&limiter, &generation);
            scope.spawn(move || hit_for_ever(limiter, generation, thread));
        }
    });
}

fn hit_for_ever(limiter: &Limiter<SlidingWindow>, generation: &str, thread: usize) {
    // Neighbours begin at different clients, and meet.
    for hit in thread * KEYS / THREADS.. {
        let client = hit % KEYS;
        let decision = limiter.check(generation, &client.to_string()).unwrap();
        if decision.is_allowed() {
            let count = decision.limit() - decision.remaining();
            say(&format!("hit {client} {count}"));
        } else {
            say("refused");
        }
        if thread == 0 && hit % HITS_BETWEEN_FLUSHES == 0 {
            say("begin");
            limiter.vault().flush().unwrap();
            say("end");
        }
    }
}

// The process that kills.

/// What a process said about one client.
#[derive(Clone, Copy, Debug, Default)]
struct Said {
    /// How many of its hits were admitted.
    admitted: u32,
    /// The most hits it was told to have.
    count: u32,
}

#[derive(Debug, Default)]
struct Speech {
    /// What was said before the last completed flush began.
    flushed: BTreeMap<usize, Said>,
    /// What was said altogether.
    answered: BTreeMap<usize, Said>,
    /// What was said before the flush under way began.
    begun: BTreeMap<usize, Said>,
    flushes: u64,
}

impl Speech {
    fn hear(&mut self, line: &str) {
        let words: Vec<_> = line.split(' ').collect();
        match *words {
            ["hit", client, count] => {
                let said = self.answered.entry(client.parse().unwrap()).or_default();
                said.admitted += 1;
                said.count = said.count.max(count.parse().unwrap());
            }
            ["refused"] => {}
            ["begin"] => self.begun.clone_from(&self.answered),
            ["end"] => {
                self.flushes += 1;
                self.flushed = std::mem::take(&mut self.begun);
            }
            _ => panic!("{line:?}"),
        }
    }
}

fn spawn(role: Role, path: &Path, generation: u64) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--ignored", "--nocapture"])
        .arg(format!("kills::{}", role.test))
        .env(PATH, path)
        .env(GENERATION, generation.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// A moment in the life of a process.
#[derive(Debug)]
struct Moment {
    flushes: u64,
    events: u64,
}

impl Moment {
    fn random() -> Self {
        let [flushes, events] =
            [FLUSHES, EVENTS].map(|most| RandomState::new().hash_one(most) % most);
        Self { flushes, events }
    }
}

/// Kills a process at a moment, and hears it out.
fn killed_at(moment: &Moment, mut process: Child) -> Speech {
    let mut lines = BufReader::new(process.stderr.take().unwrap());
    let (mut speech, mut left) = (Speech::default(), Some(moment.events));
    loop {
        if left == Some(0) {
            process.kill().unwrap();
            left = None;
        }
        let mut line = String::new();
        lines.read_line(&mut line).unwrap();
        match line.strip_suffix('\n') {
            Some(line) => speech.hear(line),
            None => break,
        }
        if speech.flushes >= moment.flushes {
            left = left.map(|left| left - 1);
        }
    }
    assert_eq!(left, None, "it ended by itself: {speech:?}");
    process.wait().unwrap();
    speech
}

/// A file whose processes are killed, and what is known of the clients of this generation.
struct Killing {
    role: Role,
    path: PathBuf,
    generation: u64,
    clients: BTreeMap<usize, Client>,
    flushes: u64,
    refused: u64,
    survived: u64,
    answered: u64,
    /// Answered hits that should have been there.
    lost: u64,
    /// Answered hits that no completed flush had carried, and that were not there.
    forgotten: u64,
}

#[derive(Debug, Default)]
struct Client {
    admitted: u32,
    /// How many answered hits may have been lost.
    forgiven: u32,
}

impl Killing {
    fn kill(&mut self) {
        let process = spawn(self.role, &self.path, self.generation);
        let speech = killed_at(&Moment::random(), process);
        self.flushes += speech.flushes;
        let limiter = limiter(&self.path, self.role);
        for client in 0..KEYS {
            let of = |said: &BTreeMap<usize, Said>| said.get(&client).copied().unwrap_or_default();
            self.check(&limiter, client, of(&speech.flushed), of(&speech.answered));
        }
        // Every row can be read.
        for row in limiter.vault().scan() {
            row.unwrap();
        }
        limiter.vault().close().unwrap();
        self.survived += 1;
    }

    fn check(
        &mut self,
        limiter: &Limiter<SlidingWindow>,
        client: usize,
        flushed: Said,
        answered: Said,
    ) {
        let on_disk = match self.role.durability {
            Durability::Committed => answered,
            _ => flushed,
        };
        let generation = self.generation.to_string();
        let limit = self.role.limit;
        let left = limiter.peek(&generation, &client.to_string());
        let found = limit - left.unwrap().remaining();
        let missing = |said: Said| u64::from(said.count.saturating_sub(found));
        self.answered += u64::from(answered.admitted);
        self.lost += missing(on_disk);
        self.forgotten += missing(answered) - missing(on_disk);
        let known = self.clients.entry(client).or_default();
        known.admitted += answered.admitted;
        known.forgiven += answered.admitted - on_disk.admitted;
        let most = limit + known.forgiven;
        assert!(known.admitted <= most, "{client}: {known:?}");
        self.refused += u64::from(found == limit);
    }
}

/// Kills a hundred processes at random moments, the opening included.
fn kill(role: Role) {
    let directory = tempfile::tempdir().unwrap();
    let mut killing = Killing {
        role,
        path: directory.path().join("vault.redb"),
        generation: 0,
        clients: BTreeMap::new(),
        flushes: 0,
        refused: 0,
        survived: 0,
        answered: 0,
        lost: 0,
        forgotten: 0,
    };
    for number in 0..KILLS {
        if number % KILLS_OF_A_GENERATION == 0 && number > 0 {
            Contents::read(&killing.path, "rate_limits").check_invariant();
            killing.generation += 1;
            killing.clients.clear();
        }
        killing.kill();
    }
    println!(
        "{:?}: {} of {KILLS} kills survived, {} hits answered by {THREADS} threads, {} of them lost, {} not yet carried to the disk",
        role.durability, killing.survived, killing.answered, killing.lost, killing.forgotten
    );
    assert_eq!(killing.lost, 0, "answered hits were lost");
    if role.durability == Durability::Committed {
        assert_eq!(killing.forgotten, 0);
    }
    // It was worth it: flushes were completed, and limits reached.
    assert!(killing.flushes > KILLS, "{}", killing.flushes);
    assert!(killing.refused > 0);
}

#[test]
fn of_a_hundred_kills_none_takes_what_a_completed_flush_has_carried() {
    kill(IN_MEMORY);
}

#[test]
fn of_a_hundred_kills_none_takes_an_answered_hit_of_a_committed_table() {
    kill(ON_DISK);
}
