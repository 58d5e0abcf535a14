//! The storage fails: callers hear it, nothing answered is lost, service resumes by itself.

mod everywhere;
mod model;
mod run;
mod script;

use std::sync::Arc;
use std::thread;

use ratevault::{
    Applied, Error, HitLog, Limiter, Quota, SlidingWindow, Storage, Vault, VaultBuilder,
};

use crate::support::faulty::Faulty;
use crate::support::{eventually, single_threaded};

fn limiter(storage: &Arc<Faulty>) -> Limiter<SlidingWindow> {
    open(storage, Vault::builder("rate_limits"))
}

/// One that reads every page from the storage.
fn uncached(storage: &Arc<Faulty>) -> Limiter<SlidingWindow> {
    open(storage, Vault::builder("rate_limits").cache_bytes(0))
}

fn open(storage: &Arc<Faulty>, builder: VaultBuilder<HitLog>) -> Limiter<SlidingWindow> {
    let vault = builder.storage(Arc::clone(storage)).open().unwrap();
    let window = SlidingWindow::new(Quota::per_hour(1_000).unwrap()).unwrap();
    Limiter::new(vault, window)
}

fn outcome(error: Error) -> Applied {
    match error {
        Error::Unavailable { applied, .. } => applied,
        error => panic!("{error:?}"),
    }
}

fn used(limiter: &Limiter<SlidingWindow>, client: &str) -> u32 {
    1_000 - limiter.peek("login", client).unwrap().remaining()
}

#[test]
fn a_failed_commit_fails_its_whole_batch_and_service_resumes() {
    let storage = Arc::new(Faulty::default());
    let limiter = limiter(&storage);
    for _ in 0..3 {
        limiter.check("login", "ada").unwrap();
    }
    // Ten wait behind a commit whose last sync is held; then the disk breaks.
    storage.hold(true);
    let held = limiter.check_async("login", "held");
    storage.until_a_sync_waits();
    let batch: Vec<_> = (0..10)
        .map(|_| limiter.check_async("login", "ada"))
        .collect();
    storage.fail_after_syncs(0);
    storage.hold(false);

    let runtime = single_threaded();
    assert_eq!(
        outcome(runtime.block_on(held).unwrap_err()),
        Applied::Unknown
    );
    for pending in batch {
        assert_eq!(outcome(runtime.block_on(pending).unwrap_err()), Applied::No);
    }
    // Fast, whatever is asked.
    assert_eq!(
        outcome(limiter.check("login", "ada").unwrap_err()),
        Applied::No
    );
    assert_eq!(
        outcome(limiter.peek("login", "ada").unwrap_err()),
        Applied::No
    );

    storage.fail(false);
    eventually("service resumes", || limiter.check("login", "bob").is_ok());
    assert_eq!(used(&limiter, "ada"), 3);
    limiter.vault().close().unwrap();
}

#[test]
fn every_caller_of_a_batch_in_commit_hears_that_the_outcome_is_unknown() {
    let storage = Arc::new(Faulty::default());
    let limiter = limiter(&storage);
    storage.hold(true);
    let first = limiter.check_async("login", "first");
    storage.until_a_sync_waits();
    let batch: Vec<_> = (0..10)
        .map(|_| limiter.check_async("login", "ada"))
        .collect();
    // The commit under way takes its two syncs; the first of the next one fails.
    storage.fail_after_syncs(2);
    storage.hold(false);
    let runtime = single_threaded();
    runtime.block_on(first).unwrap();
    for pending in batch {
        assert_eq!(
            outcome(runtime.block_on(pending).unwrap_err()),
            Applied::Unknown
        );
    }
    storage.fail(false);
    eventually("service resumes", || limiter.check("login", "bob").is_ok());
    // All of the batch or nothing.
    assert!([0, 10].contains(&used(&limiter, "ada")));
    assert_eq!(used(&limiter, "first"), 1);
}

#[test]
fn a_fault_that_only_a_reader_meets_is_mended_too() {
    let storage = Arc::new(Faulty::default());
    let limiter = uncached(&storage);
    limiter.check("login", "ada").unwrap();
    storage.fail(true);
    assert_eq!(
        outcome(limiter.peek("login", "ada").unwrap_err()),
        Applied::No
    );
    storage.fail(false);
    eventually("reads resume", || limiter.peek("login", "ada").is_ok());
    assert_eq!(used(&limiter, "ada"), 1);
}

#[test]
fn a_reset_that_fails_half_way_does_not_say_that_nothing_was_applied() {
    let storage = Arc::new(Faulty::default());
    for client in ["ada", "bob"] {
        limiter(&storage).check("login", client).unwrap();
    }
    let image = storage.durable_image();
    for reads in 0.. {
        let storage = Arc::new(Faulty::with_image(image.clone()));
        let limiter = uncached(&storage);
        storage.fail_after_reads(reads);
        let Err(error) = limiter.reset_endpoint("login") else {
            return assert!(reads > 5, "{reads}");
        };
        storage.fail(false);
        eventually("reads resume", || limiter.peek("login", "ada").is_ok());
        let used = used(&limiter, "ada") + used(&limiter, "bob");
        match outcome(error) {
            Applied::No => assert_eq!(used, 2, "{reads}"),
            Applied::Unknown => assert!([0, 2].contains(&used), "{reads}: {used}"),
        }
    }
}

#[test]
fn every_answered_hit_survives_a_fault_at_any_sync() {
    for syncs in 0..12 {
        let storage = Arc::new(Faulty::default());
        let limiter = limiter(&storage);
        storage.fail_after_syncs(syncs);
        let mut answered = 0;
        let unknown = loop {
            match limiter.check("login", "ada") {
                Ok(_) => answered += 1,
                Err(error) => break u32::from(outcome(error) == Applied::Unknown),
            }
        };
        // A power cut now, and a disk that gets well.
        let image = Arc::new(Faulty::with_image(storage.durable_image()));
        let found = used(&self::limiter(&image), "ada");
        assert!(
            (answered..=answered + unknown).contains(&found),
            "{answered} {found}"
        );
        storage.fail(false);
        eventually("service resumes", || limiter.check("login", "bob").is_ok());
        let found = used(&limiter, "ada");
        assert!(
            (answered..=answered + unknown).contains(&found),
            "{answered} {found}"
        );
    }
}

#[test]
fn closing_while_the_storage_fails_says_so_and_does_not_hang() {
    let storage = Arc::new(Faulty::default());
    let limiter = limiter(&storage);
    limiter.check("login", "ada").unwrap();
    storage.fail(true);
    limiter.check("login", "ada").unwrap_err();
    assert_eq!(
        outcome(limiter.vault().close().unwrap_err()),
        Applied::Unknown
    );
    assert!(matches!(
        limiter.check("login", "ada"),
        Err(Error::Closed { .. })
    ));
    storage.fail(false);
    assert_eq!(used(&self::limiter(&storage), "ada"), 1);
}

#[test]
fn opening_a_storage_that_fails_is_an_error() {
    let storage = Arc::new(Faulty::default());
    storage.fail(true);
    let opened = Vault::<HitLog>::builder("rate_limits")
        .storage(storage)
        .open();
    assert!(matches!(opened, Err(Error::Open { .. })), "{opened:?}");
}

#[test]
fn callers_are_not_blocked_while_the_storage_fails() {
    let storage = Arc::new(Faulty::default());
    let limiter = limiter(&storage);
    storage.fail(true);
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..100 {
                    outcome(limiter.check("login", "ada").unwrap_err());
                }
            });
        }
    });
    storage.fail(false);
    eventually("service resumes", || limiter.check("login", "ada").is_ok());
}

#[test]
fn a_panic_of_the_storage_is_treated_as_a_fault_and_said_in_one_line() {
    let storage = Arc::new(Faulty::default());
    let limiter = limiter(&storage);
    limiter.check("login", "ada").unwrap();
    storage.panic(true);
    let error = limiter.check("login", "ada").unwrap_err().to_string();
    assert!(!error.contains(char::is_control), "{error:?}");
    assert!(error.contains(r"injected\nin two lines"), "{error}");
    // It is being opened again, and panics at that, too.
    eventually("it was tried", || {
        let error = limiter.check("login", "ada").unwrap_err();
        matches!(error, Error::Unavailable { .. }) && error.to_string().contains("a panic")
    });
    storage.panic(false);
    eventually("service resumes", || limiter.check("login", "bob").is_ok());
    assert!((1..=2).contains(&used(&limiter, "ada")));
}

#[test]
fn a_storage_that_somebody_emptied_is_never_counted_into() {
    let storage = Arc::new(Faulty::default());
    let limiter = limiter(&storage);
    limiter.check("login", "ada").unwrap();
    storage.fail(true);
    limiter.check("login", "ada").unwrap_err();
    storage.empty();
    storage.fail(false);
    eventually("it says why", || {
        let error = limiter.check("login", "ada").unwrap_err().to_string();
        error.contains("emptied")
    });
    assert!(storage.is_empty().unwrap(), "nothing was written into it");
    limiter.vault().close().unwrap_err();
}

#[test]
fn an_error_of_the_disk_is_not_taken_for_damage() {
    let storage = Arc::new(Faulty::default());
    limiter(&storage).check("login", "ada").unwrap();
    let image = storage.durable_image();
    // Every call of the opening fails once.
    for reads in 0..200 {
        let storage = Arc::new(Faulty::with_image(image.clone()));
        storage.fail_after_reads(reads);
        let opened = Vault::<HitLog>::builder("rate_limits")
            .storage(storage)
            .open();
        match opened {
            Ok(_) => return assert!(reads > 5, "{reads}"),
            Err(Error::Open { .. } | Error::Unavailable { .. }) => {}
            Err(error) => panic!("{reads}: {error}"),
        }
    }
}
