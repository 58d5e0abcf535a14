//! A fault at every call of the storage that the script makes.

use std::collections::BTreeMap;
use std::time::Duration;

use ratevault::Durability;

use super::run::run;
use crate::support::faulty::Fault;

/// Flushes only when it is asked to.
const BUFFERED: Durability = Durability::Buffered {
    flush_every: Duration::from_secs(3_600),
};

/// While what a fault has to strike at least once, of each kind.
const EVERYWHERE: [&str; 7] = [
    "creating",
    "opening",
    "recovering",
    "resetting",
    "sweeping",
    "dropping",
    "closing",
];

/// Runs the script once for each call that it makes, with the fault at that call.
fn at_every_call(durability: Durability, fault: Fault) {
    let mut struck = BTreeMap::<_, u32>::new();
    let runs = (0..).map_while(|spared| run(durability, fault, spared));
    runs.for_each(|doing| *struck.entry(doing).or_default() += 1);
    let count: u32 = struck.values().sum();
    println!("faults injected: {count} ({fault:?}, {durability:?}), while {struck:?}");
    let answering = match durability {
        Durability::Buffered { .. } => "flushing",
        _ => "checking",
    };
    for doing in EVERYWHERE.iter().chain([&answering]) {
        assert!(struck.contains_key(doing), "none while {doing}");
    }
}

#[test]
fn an_error_at_any_call_loses_nothing_answered() {
    at_every_call(Durability::Committed, Fault::Io);
}

#[test]
fn an_error_at_any_call_loses_nothing_flushed() {
    at_every_call(BUFFERED, Fault::Io);
}

#[test]
fn a_disk_that_is_full_at_any_call_loses_nothing_answered() {
    at_every_call(Durability::Committed, Fault::Full);
}

#[test]
fn a_disk_that_is_full_at_any_call_loses_nothing_flushed() {
    at_every_call(BUFFERED, Fault::Full);
}

#[test]
fn a_torn_write_or_sync_loses_nothing_answered() {
    at_every_call(Durability::Committed, Fault::Torn);
}

#[test]
fn a_torn_write_or_sync_loses_nothing_flushed() {
    at_every_call(BUFFERED, Fault::Torn);
}

#[test]
fn a_delay_of_any_call_hangs_nobody_and_loses_nothing_answered() {
    at_every_call(Durability::Committed, Fault::Delayed);
}

#[test]
fn a_delay_of_any_call_hangs_nobody_and_loses_nothing_flushed() {
    at_every_call(BUFFERED, Fault::Delayed);
}
