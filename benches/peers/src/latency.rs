//! How long single checks take: with nothing else going on, during flushes, and during a sweep.
//!
//! One thread, 100,000 clients at random. All three read the clock twice for a sample, and ask the
//! vault for its counters before and after each batch of samples; a batch counts if what is to go on
//! goes on at both ends.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use crate::folder;
use crate::load::{Draw, clients};
use crate::ours::{Ours, RARELY, quota};
use crate::report::{Figure, Flushing, Latency, Load, Report};
use crate::turns::Effort;

const KEYS: u32 = 100_000;
const BATCH: usize = 2_000;

/// The quota of what is sampled: 20 per 1 ms, as everywhere in memory.
const LIMIT: u32 = 20;
const WINDOW: Duration = Duration::from_millis(1);

/// A flush follows the other.
const ALWAYS: Duration = Duration::from_millis(1);

/// How many rows expire while the sweep is measured, and after what time. They have to be on disk
/// before.
const EXPIRING: u32 = 300_000;
const EXPIRE_AFTER: Duration = Duration::from_secs(4);

/// How many samples are enough whatever the effort, and when it is too late for them.
const ENOUGH: usize = 200_000;
const TOO_LATE: Duration = Duration::from_secs(60);

pub(crate) fn run(effort: Effort, report: &mut Report) -> io::Result<()> {
    let clients: Vec<_> = clients(KEYS).collect();
    let least = effort.figure();
    report.add([
        rest(&clients, least),
        flush(&clients, least),
        sweep(&clients, least),
    ])
}

/// Nothing is flushed, so nothing is on disk to be swept.
fn rest(clients: &[String], least: Duration) -> Figure {
    let folder = folder();
    let path = folder.path().join("limits.redb");
    let ours = Ours::buffered(&path, RARELY, quota(LIMIT, WINDOW));
    ours.check_all(clients);
    sample("latency rest", &ours, clients, least, || Phase::On)
}

/// What is flushed waits for 1 ms at most before its flush begins. So a flush is under way if
/// something has waited for longer.
fn flush(clients: &[String], least: Duration) -> Figure {
    let folder = folder();
    let path = folder.path().join("limits.redb");
    let ours = Ours::buffered(&path, ALWAYS, quota(LIMIT, WINDOW));
    ours.check_all(clients);
    ours.flush();
    ours.check_all(clients);
    sample("latency flush", &ours, clients, least, || {
        let stats = ours.limiter.vault().stats().expect("counters");
        match stats.oldest_unflushed {
            Some(waits) if waits > 5 * ALWAYS => Phase::On,
            _ => Phase::Between,
        }
    })
}

/// Other clients than those who are sampled have rows on disk, which expire; nothing is flushed.
fn sweep(clients: &[String], least: Duration) -> Figure {
    let folder = folder();
    let path = folder.path().join("limits.redb");
    let ours = Ours::buffered(&path, RARELY, quota(LIMIT, WINDOW));
    let others = ours.with(quota(LIMIT, EXPIRE_AFTER));
    for client in crate::load::clients(EXPIRING) {
        let checked = others.limiter.check("other", &client);
        checked.expect("a decision");
    }
    ours.flush();
    let stats = || ours.limiter.vault().stats().expect("counters");
    let on_disk = stats().rows;
    assert!(on_disk > u64::from(EXPIRING / 2), "only {on_disk} on disk");
    ours.check_all(clients);
    while stats().swept == 0 {
        thread::sleep(Duration::from_millis(1));
        ours.check_all(clients.get(..1).unwrap_or_default());
    }
    ours.check_all(clients);
    sample("latency sweep", &ours, clients, least, || {
        match stats().rows {
            0 => Phase::Over,
            _ => Phase::On,
        }
    })
}

/// Whether that goes on during which samples are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    On,
    Between,
    Over,
}

/// Takes samples for so long, or until it is over.
fn sample(
    bench: &'static str,
    ours: &Ours,
    clients: &[String],
    least: Duration,
    phase: impl Fn() -> Phase,
) -> Figure {
    let (mut samples, mut seconds) = (Vec::with_capacity(1 << 25), 0.0);
    let (mut draw, before, started) = (Draw::new(1), ours.flushing(), Instant::now());
    while started.elapsed() < TOO_LATE && (seconds < least.as_secs_f64() || samples.len() < ENOUGH)
    {
        let (at_first, length, began) = (phase(), samples.len(), Instant::now());
        if at_first == Phase::Over {
            break;
        }
        for _ in 0..BATCH {
            let client = draw.one_of(clients);
            let asked = Instant::now();
            ours.check(client);
            samples.push(u64::try_from(asked.elapsed().as_nanos()).unwrap_or(u64::MAX));
        }
        let took = began.elapsed();
        if at_first == Phase::On && phase() == Phase::On {
            seconds += took.as_secs_f64();
        } else {
            samples.truncate(length);
        }
    }
    assert!(
        samples.len() >= ENOUGH,
        "{bench}: {} samples",
        samples.len()
    );
    let load = Load {
        bench,
        keys: KEYS,
        threads: 1,
    };
    let figure = Figure::new(load, "ours buffered").latency(percentiles(&mut samples));
    let flushing: Flushing = ours.flushing().since(before);
    figure.flushing(flushing).seconds(seconds)
}

fn percentiles(samples: &mut [u64]) -> Latency {
    samples.sort_unstable();
    let at = |percent: usize| {
        let rank = (samples.len() * percent).div_ceil(100).saturating_sub(1);
        samples.get(rank).copied().unwrap_or_default()
    };
    Latency {
        p50_ns: at(50),
        p99_ns: at(99),
        max_ns: at(100),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_is_the_smallest_sample_that_so_many_do_not_exceed() {
        let of = |mut samples: Vec<u64>| {
            let latency = percentiles(&mut samples);
            (latency.p50_ns, latency.p99_ns, latency.max_ns)
        };
        assert_eq!(of((1..=1_000).rev().collect()), (500, 990, 1_000));
        assert_eq!(of(vec![7]), (7, 7, 7));
        assert_eq!(of(vec![2, 1]), (1, 2, 2));
    }
}
