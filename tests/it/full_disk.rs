//! A disk that is full for real: a file system in memory with no room left on it. Needs root.
//!
//! `cargo test --test it -- --ignored --nocapture full_disk::` prints what was answered and refused.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use ratevault::{
    Applied, Durability, Error, HitLog, Limiter, Quota, Refusals, SlidingWindow, Vault,
};

use crate::support::eventually;
use crate::support::file::Contents;
use crate::support::mount::Mount;

const LIMIT: u32 = 10_000;

/// What a check takes: a check that was half counted would show.
const COST: u32 = 3;

/// The size of the file system, room for a vault and little else.
const BYTES: usize = 4 << 20;

/// How many full disks the service has to come back from, one after the other. Each has room for one
/// more page than the one before, so that it is another write that finds none.
const ROUNDS: u64 = 12;

const FILE: &str = "vault.redb";

const NO_ROOM: &str = "No space left on device";

struct Service {
    mount: Mount,
    limiter: Limiter<SlidingWindow>,
    clients: BTreeMap<String, Known>,
    /// How many clients there were, as each is called by its number.
    newcomers: usize,
    refused: u32,
}

/// What is known of the hits of a client.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    answered: u32,
    /// Of a check that failed it may not be known whether it counts.
    unknown: u32,
}

impl Service {
    fn new(durability: Durability) -> Self {
        let mount = Mount::new(BYTES);
        let limiter = open(&mount.path(FILE), durability);
        Self {
            mount,
            limiter,
            clients: BTreeMap::new(),
            newcomers: 0,
            refused: 0,
        }
    }

    /// One check. An error is one of a full disk, and is handed back.
    fn check(&mut self, client: &str) -> Result<(), Error> {
        let checked = self.limiter.check_n("login", client, COST);
        let known = self.clients.entry(client.to_owned()).or_default();
        match checked {
            Ok(decision) => {
                assert!(decision.is_allowed());
                known.answered += COST;
                Ok(())
            }
            Err(error) => {
                self.refused += 1;
                match &error {
                    Error::Unavailable { path, applied, .. } => {
                        assert_eq!(*path, self.mount.path(FILE));
                        if *applied == Applied::Unknown {
                            known.unknown += COST;
                        }
                    }
                    other => panic!("{other:?}"),
                }
                Err(error)
            }
        }
    }

    /// Checks one client after another that was never seen, until something fails.
    fn check_newcomers_until(
        &mut self,
        mut has_failed: impl FnMut(&Self, Result<(), Error>) -> bool,
    ) {
        loop {
            self.newcomers += 1;
            let checked = self.check(&self.newcomers.to_string());
            if has_failed(self, checked) {
                return;
            }
        }
    }

    /// Every client has the hits that were answered; at most some more of checks whose outcome was
    /// unknown, and those whole. Says how many are missing: none.
    fn lost(&self) -> u32 {
        let mut lost = 0;
        for (client, known) in &self.clients {
            let found = LIMIT - self.limiter.peek("login", client).unwrap().remaining();
            let most = known.answered + known.unknown;
            assert!(found <= most, "{client}: {found}, {known:?}");
            assert_eq!(found % COST, 0, "{client} was half counted");
            lost += known.answered.saturating_sub(found);
        }
        assert_eq!(lost, 0, "answered hits were lost");
        lost
    }

    /// Closes the vault, looks through its file and opens it again.
    fn reopen(&mut self, durability: Durability) {
        self.limiter.vault().close().unwrap();
        Contents::read(&self.mount.path(FILE), "rate_limits").check_invariant();
        self.limiter = open(&self.mount.path(FILE), durability);
    }

    fn report(&self, name: &str) {
        let lost = self.lost();
        let answered: u32 = self.clients.values().map(|known| known.answered).sum();
        println!(
            "{name}: {ROUNDS} full disks, {answered} hits answered, {} checks refused, {lost} answered hits lost",
            self.refused
        );
    }
}

fn open(path: &Path, durability: Durability) -> Limiter<SlidingWindow> {
    let vault = Vault::<HitLog>::builder("rate_limits").path(path);
    let window = SlidingWindow::new(Quota::per_day(LIMIT).unwrap()).unwrap();
    let vault = vault.durability(durability).open().unwrap();
    Limiter::new(vault, window.refusals(Refusals::Ignore))
}

#[test]
#[ignore = "needs root: mounts a small file system"]
fn a_full_disk_refuses_and_recovers_without_a_restart_losing_no_answered_hit() {
    let mut service = Service::new(Durability::Committed);
    for room in 0..ROUNDS {
        for client in ["ada", "bob"] {
            service.check(client).unwrap();
        }
        service.mount.fill_but(room);
        service.check_newcomers_until(|_, checked| {
            let error = checked.err().map(|error| error.to_string());
            error
                .inspect(|text| assert!(text.contains(NO_ROOM), "{text}"))
                .is_some()
        });
        // However often it is tried, also after the file was opened again: counted or refused.
        for _ in 0..50 {
            for client in ["ada", "bob"] {
                let _ = service.check(client);
            }
        }
        service.mount.free();
        eventually("service resumes", || service.check("ada").is_ok());
        service.check("newcomer").unwrap();
        service.lost();
    }
    service.reopen(Durability::Committed);
    service.report("committed");
}

#[test]
#[ignore = "needs root: mounts a small file system"]
fn with_a_full_disk_buffered_decisions_go_on_in_memory_and_all_are_carried_once_there_is_room() {
    let durability = Durability::Buffered {
        flush_every: Duration::from_millis(5),
    };
    let mut service = Service::new(durability);
    let mut still_full = 0;
    for room in 0..ROUNDS {
        for client in ["ada", "bob"] {
            service.check(client).unwrap();
        }
        service.mount.fill_but(room);
        // Newcomers have to be looked up in the file, and are refused while it is being opened again.
        // They come no faster than they are flushed, or the disk would be too small for them for ever.
        service.check_newcomers_until(|service, _| {
            let mut is_full = false;
            if service.newcomers.is_multiple_of(100) {
                eventually("they are flushed, or cannot be", || {
                    let stats = service.limiter.vault().stats().unwrap();
                    let error = stats.last_flush_error.map(|error| error.to_string());
                    is_full = error.is_some_and(|text| text.contains(NO_ROOM));
                    is_full || stats.oldest_unflushed.is_none()
                });
            }
            is_full
        });
        for _ in 0..50 {
            for client in ["ada", "bob"] {
                service.check(client).unwrap();
            }
        }
        // A failed transaction that is rolled back may give the file room enough for these few.
        if let Err(error) = service.limiter.vault().flush() {
            assert!(error.to_string().contains(NO_ROOM), "{error}");
            still_full += 1;
        }

        service.mount.free();
        // Without any further call.
        eventually("all is on disk", || {
            let stats = service.limiter.vault().stats().unwrap();
            stats.oldest_unflushed.is_none() && stats.last_flush_error.is_none()
        });
        service.check("newcomer").unwrap();
        service.lost();
    }
    assert!(still_full > 0, "it was never full");
    assert!(service.clients.values().all(|known| known.unknown == 0));
    service.reopen(durability);
    service.report("buffered");
}

#[test]
#[ignore = "needs root: mounts a small file system"]
fn a_vault_that_has_no_room_to_be_made_in_is_an_error_that_leaves_nothing_behind() {
    let mount = Mount::new(BYTES);
    mount.fill_but(0);
    let path = mount.path(FILE);
    let error = Vault::<HitLog>::builder("rate_limits").path(&path).open();
    let text = error.unwrap_err().to_string();
    for part in [&format!("{path:?}"), NO_ROOM] {
        assert!(text.contains(part), "{text}");
    }
    let left: Vec<_> = std::fs::read_dir(path.parent().unwrap()).unwrap().collect();
    assert_eq!(left.len(), 1, "{left:?}");
    mount.free();
    Vault::<HitLog>::builder("rate_limits")
        .path(&path)
        .open()
        .unwrap()
        .close()
        .unwrap();
}

#[test]
#[ignore = "needs root: mounts a small file system"]
fn a_vault_that_was_closed_opens_on_a_full_disk_and_knows_every_hit() {
    let mut service = Service::new(Durability::Committed);
    service.check("ada").unwrap();
    service.limiter.vault().close().unwrap();
    service.mount.fill_but(0);
    service.limiter = open(&service.mount.path(FILE), Durability::Committed);
    service.lost();
    service.check_newcomers_until(|_, checked| checked.is_err());
    service.mount.free();
    eventually("service resumes", || service.check("ada").is_ok());
    service.reopen(Durability::Committed);
    service.lost();
}

// A process that is killed while the disk is full.

const CHILD: &str = "RATEVAULT_TEST_FULL_DISK";

#[test]
#[ignore = "a process of another test"]
fn hits_until_it_is_killed() {
    let Some(path) = std::env::var_os(CHILD) else {
        return;
    };
    let limiter = open(Path::new(&path), Durability::Committed);
    let say = |what: &str| writeln!(io::stderr().lock(), "{what}").unwrap();
    for client in 0.. {
        for client in ["ada", &client.to_string()] {
            match limiter.check("login", client) {
                Ok(_) if client == "ada" => say("ada"),
                Ok(_) => {}
                Err(_) => say("refused"),
            }
        }
    }
}

#[test]
#[ignore = "needs root: mounts a small file system"]
fn a_process_that_is_killed_on_a_full_disk_loses_no_answered_hit() {
    for room in 0..ROUNDS {
        let mount = Mount::new(BYTES);
        let path = mount.path(FILE);
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--ignored", "--nocapture"])
            .arg("full_disk::hits_until_it_is_killed")
            .env(CHILD, &path)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (mut answered, mut refused) = (0, 0);
        for line in BufReader::new(process.stderr.take().unwrap()).lines() {
            match &*line.unwrap() {
                "ada" => answered += 1,
                "refused" => refused += 1,
                other => panic!("{other}"),
            }
            if answered == 5 && refused == 0 {
                mount.fill_but(room);
            }
            if refused == 1 {
                process.kill().unwrap();
            }
        }
        process.wait().unwrap();
        assert!(refused > 0, "it was never full");
        // What it left may need room to be recovered. It is never taken for damage.
        let vault = Vault::<HitLog>::builder("rate_limits").path(&path);
        if let Err(error) = vault.open() {
            let text = error.to_string();
            assert!(text.contains(NO_ROOM), "{text}");
            assert!(text.contains(&format!("{path:?}")), "{text}");
        }
        mount.free();
        let limiter = open(&path, Durability::Committed);
        let found = LIMIT - limiter.peek("login", "ada").unwrap().remaining();
        let unknown = 1 + refused;
        assert!(
            (answered..=answered + unknown).contains(&found),
            "{found} of {answered}"
        );
    }
}
