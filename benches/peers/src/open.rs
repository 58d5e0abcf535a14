//! How long a file takes to open whose process was killed.

use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::process;
use std::time::{Duration, Instant};

use ratevault::Durability;

use crate::child::{Role, spawn};
use crate::folder;
use crate::load::clients;
use crate::ours::{FLUSH_EVERY, Ours, quota};
use crate::report::{Figure, Load, Report};

const KEYS: u32 = 1_000_000;
const LIMIT: u32 = 5;
const WINDOW: Duration = Duration::from_secs(3_600);

/// What the victim says once it is busy.
const READY: &str = "ready";

/// A million clients in a committed table; SIGKILL between two commits or within one.
pub(crate) fn run(report: &mut Report) -> io::Result<()> {
    let folder = folder();
    let mut victim = spawn(Role::Victim, folder.path());
    let said = first_line(&mut victim);
    victim.kill().expect("a child of this process");
    victim.wait().expect("a child of this process");
    assert_eq!(said, READY, "the victim failed");

    let started = Instant::now();
    let ours = open(folder.path());
    let seconds = started.elapsed().as_secs_f64();
    assert_eq!(ours.limiter.vault().len().ok(), Some(KEYS.into()));
    let load = Load {
        bench: "open after kill",
        keys: KEYS,
        threads: 1,
    };
    report.add([Figure::new(load, "ours committed").seconds(seconds)])
}

fn first_line(child: &mut process::Child) -> String {
    let output = child.stdout.take().expect("a pipe");
    let line = BufReader::new(output).lines().next();
    line.and_then(Result::ok).unwrap_or_default()
}

fn open(folder: &Path) -> Ours {
    let quota = quota(LIMIT, WINDOW);
    Ours::open(&folder.join("limits.redb"), Durability::Committed, quota)
}

/// Fills the file, buffered as that is quicker, and then checks clients until it is killed.
pub(crate) fn be_killed(folder: &Path) {
    /// By then whoever was to kill it is gone itself.
    const LONGEST: Duration = Duration::from_secs(60);
    let path = folder.join("limits.redb");
    let buffered = Ours::buffered(&path, FLUSH_EVERY, quota(LIMIT, WINDOW));
    for client in clients(KEYS) {
        buffered.check(&client);
    }
    buffered.close();
    drop(buffered);
    let ours = open(folder);
    let started = Instant::now();
    for (number, client) in clients(KEYS).enumerate() {
        ours.check(&client);
        if number == 200 {
            println!("{READY}");
            io::stdout().flush().expect("somebody who reads");
        }
        if started.elapsed() > LONGEST {
            break;
        }
    }
}
