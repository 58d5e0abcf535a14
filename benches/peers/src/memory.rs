//! What a client costs: memory, and room on the disk.
//!
//! A million clients with IPv4 texts come five times each; the limit is 5 an hour. Resident memory is
//! read before and after in a process that does nothing else and keeps no list of the clients. Ours is
//! read after a flush: what the file's cache and the flush keep is included.

use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::child::{Role, ask};
use crate::folder;
use crate::governed::Governed;
use crate::load::clients;
use crate::ours::{FLUSH_EVERY, Ours, quota};
use crate::report::{Figure, Flushing, Load, Report};

const KEYS: u32 = 1_000_000;
const LIMIT: u32 = 5;
const WINDOW: Duration = Duration::from_secs(3_600);

/// What a child found out.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Filled {
    memory: u64,
    file: u64,
    flushes: u64,
    rows_flushed: u64,
    on_disk: u64,
    seconds: f64,
}

pub(crate) fn run(report: &mut Report) -> io::Result<()> {
    let folder = folder();
    let load = |bench| Load {
        bench,
        keys: KEYS,
        threads: 1,
    };
    let per_key = |bytes: u64| bytes as f64 / f64::from(KEYS);
    let ours: Filled = ask(Role::FillOurs, folder.path());
    let governor: u64 = ask(Role::FillGovernor, folder.path());
    let flushing = Flushing {
        every: FLUSH_EVERY,
        flushes: ours.flushes,
        rows_flushed: ours.rows_flushed,
        on_disk: ours.on_disk,
    };
    let figure = |bench, bytes| {
        let figure = Figure::new(load(bench), "ours buffered").bytes_per_key(per_key(bytes));
        figure.flushing(flushing).seconds(ours.seconds)
    };
    report.add([
        figure("memory", ours.memory),
        Figure::new(load("memory"), "governor").bytes_per_key(per_key(governor)),
        figure("disk", ours.file),
    ])
}

pub(crate) fn fill_ours(folder: &Path) -> Filled {
    let path = folder.join("limits.redb");
    let before = resident();
    let ours = Ours::buffered(&path, FLUSH_EVERY, quota(LIMIT, WINDOW));
    let started = Instant::now();
    for client in clients(KEYS) {
        for _ in 0..LIMIT {
            ours.check(&client);
        }
    }
    ours.flush();
    let (memory, flushing) = (resident().saturating_sub(before), ours.flushing());
    assert_eq!(flushing.on_disk, u64::from(KEYS), "every client is there");
    let seconds = started.elapsed().as_secs_f64();
    ours.close();
    Filled {
        memory,
        file: fs::metadata(&path).expect("a file").len(),
        flushes: flushing.flushes,
        rows_flushed: flushing.rows_flushed,
        on_disk: flushing.on_disk,
        seconds,
    }
}

pub(crate) fn fill_governor() -> u64 {
    let before = resident();
    let governed = Governed::new(LIMIT, WINDOW);
    for client in clients(KEYS) {
        for _ in 0..LIMIT {
            governed.check(&client);
        }
    }
    let memory = resident().saturating_sub(before);
    let known = u32::try_from(governed.len()).ok();
    assert_eq!(known, Some(KEYS), "every client is there");
    memory
}

/// How many bytes of memory this process has. Linux says it in pages in `/proc/self/statm`, and the
/// same number in kB here.
fn resident() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("Linux");
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kb = resident.and_then(|line| line.trim().strip_suffix(" kB"));
    let kb = kb.and_then(|kb| kb.parse::<u64>().ok());
    kb.expect("a size in kB") * 1_024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_used_is_counted() {
        let before = resident();
        let memory = vec![1_u8; 64 << 20];
        let used = resident().saturating_sub(before);
        assert!(used >= 60 << 20, "{used} of {}", memory.len());
    }
}
