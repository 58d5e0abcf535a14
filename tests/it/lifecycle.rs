//! Handles, closures and futures that come and go at awkward moments.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use ratevault::{Applied, Error, Vault};

use crate::support::faulty::Faulty;
use crate::support::{MINUTE, Number, key, single_threaded};

fn in_memory() -> Vault<Number> {
    Vault::builder("numbers").in_memory().open().unwrap()
}

fn increment(vault: &Vault<Number>, client: &str) -> Result<u64, Error> {
    vault.update(&key(client), |slot| {
        let Number(number) = slot.take().unwrap_or_default();
        slot.put(Number(number + 1), MINUTE);
        number + 1
    })
}

#[test]
fn the_last_handle_may_be_dropped_inside_an_update() {
    let storage = Arc::new(Faulty::default());
    let open = || {
        Vault::<Number>::builder("numbers")
            .storage(Arc::clone(&storage))
            .open()
            .unwrap()
    };
    let (sender, handles) = mpsc::channel::<Vault<Number>>();
    let vault = open();
    let pending = vault.update_async(&key("a"), move |slot| {
        slot.put(Number(7), MINUTE);
        drop(handles.recv().unwrap());
    });
    sender.send(vault).unwrap();
    let runtime = single_threaded();
    runtime.block_on(pending).unwrap();
    assert_eq!(open().get(&key("a")).unwrap(), Some(Number(7)));
}

#[test]
fn a_vault_used_inside_an_update_is_an_error_not_a_hang() {
    let (vault, inside) = (in_memory(), in_memory());
    let same = vault.clone();
    let results = vault.update(&key("a"), move |_| {
        [
            increment(&same, "b").map(drop),
            increment(&inside, "b").map(drop),
            same.put(&key("b"), Number(1), MINUTE),
            same.remove(&key("b")).map(drop),
            same.remove_endpoint("test").map(drop),
            same.sweep().map(drop),
            same.flush(),
            same.close(),
            Vault::<Number>::builder("numbers")
                .in_memory()
                .open()
                .map(drop),
        ]
    });
    for result in results.unwrap() {
        assert!(matches!(result, Err(Error::InsideUpdate)), "{result:?}");
    }
    assert_eq!(increment(&vault, "a").unwrap(), 1);
}

#[test]
fn reading_inside_an_update_finds_the_latest_commit() {
    let vault = in_memory();
    increment(&vault, "a").unwrap();
    let same = vault.clone();
    let read = vault.update(&key("a"), move |slot| {
        slot.put(Number(9), MINUTE);
        same.get(&key("a")).unwrap()
    });
    assert_eq!(read.unwrap(), Some(Number(1)));
}

#[test]
fn a_panic_in_a_closure_reaches_that_caller_only() {
    let storage = Arc::new(Faulty::default());
    let vault = Vault::<Number>::builder("numbers")
        .storage(Arc::clone(&storage))
        .open()
        .unwrap();
    increment(&vault, "a").unwrap();

    // Both wait behind a sync that is held, so that they share one transaction.
    storage.hold(true);
    let held = vault.update_async(&key("held"), |slot| slot.put(Number(0), MINUTE));
    storage.until_a_sync_waits();
    let panicking = vault.update_async(&key("a"), |slot| {
        slot.put(Number(100), MINUTE);
        panic!("mine");
    });
    let other = vault.update_async(&key("b"), |slot| slot.put(Number(5), MINUTE));
    storage.hold(false);

    let runtime = single_threaded();
    runtime.block_on(held).unwrap();
    let panic = catch_unwind(AssertUnwindSafe(|| runtime.block_on(panicking)));
    let panic: Result<Result<(), Error>, _> = panic;
    assert_eq!(panic.unwrap_err().downcast_ref::<&str>(), Some(&"mine"));
    runtime.block_on(other).unwrap();
    assert_eq!(vault.get(&key("b")).unwrap(), Some(Number(5)));
    assert_eq!(increment(&vault, "a").unwrap(), 2);

    let blocking = catch_unwind(AssertUnwindSafe(|| {
        vault.update(&key("a"), |_| panic!("too"))
    }));
    let blocking: Result<Result<(), Error>, _> = blocking;
    assert_eq!(blocking.unwrap_err().downcast_ref::<&str>(), Some(&"too"));
    assert_eq!(increment(&vault, "a").unwrap(), 3);
}

#[test]
fn a_dropped_future_still_counts() {
    let vault = in_memory();
    drop(vault.update_async(&key("a"), |slot| slot.put(Number(3), MINUTE)));
    vault.flush().unwrap();
    assert_eq!(vault.get(&key("a")).unwrap(), Some(Number(3)));
}

#[test]
fn a_future_outlives_its_vault() {
    let vault = in_memory();
    let pending = vault.update_async(&key("a"), |_| 5);
    drop(vault);
    let runtime = single_threaded();
    assert_eq!(runtime.block_on(pending).unwrap(), 5);
}

#[test]
fn no_answer_comes_before_the_commit_it_depends_on() {
    let storage = Arc::new(Faulty::default());
    let vault = Vault::<Number>::builder("numbers")
        .storage(Arc::clone(&storage))
        .open()
        .unwrap();
    storage.hold(true);
    let (answered, answers) = mpsc::channel();
    thread::scope(|scope| {
        let vault = &vault;
        scope.spawn(move || answered.send(increment(vault, "a")).unwrap());
        storage.until_a_sync_waits();
        assert!(answers.try_recv().is_err());
        assert_eq!(vault.get(&key("a")).unwrap(), None);
        storage.hold(false);
        assert_eq!(answers.recv().unwrap().unwrap(), 1);
    });
    // What was answered survives a power cut at this moment.
    let image = Arc::new(Faulty::with_image(storage.durable_image()));
    let after = Vault::<Number>::builder("numbers")
        .storage(image)
        .open()
        .unwrap();
    assert_eq!(after.get(&key("a")).unwrap(), Some(Number(1)));
}

#[test]
fn a_batch_that_changed_nothing_commits_nothing() {
    let storage = Arc::new(Faulty::default());
    let vault = Vault::<Number>::builder("numbers")
        .storage(Arc::clone(&storage))
        .open()
        .unwrap();
    increment(&vault, "a").unwrap();
    let before = storage.syncs();
    for _ in 0..100 {
        assert_eq!(
            vault
                .update(&key("a"), |slot| slot.value().copied())
                .unwrap(),
            Some(Number(1))
        );
        assert!(!vault.remove(&key("nobody")).unwrap());
        vault.flush().unwrap();
    }
    assert_eq!(storage.syncs(), before);
}

#[test]
fn a_full_queue_is_overloaded_at_once() {
    let storage = Arc::new(Faulty::default());
    let vault = Vault::<Number>::builder("numbers")
        .storage(Arc::clone(&storage))
        .open()
        .unwrap();
    storage.hold(true);
    let first = vault.update_async(&key("a"), |slot| slot.put(Number(1), MINUTE));
    storage.until_a_sync_waits();
    let waiting: Vec<_> = (0..16_384)
        .map(|_| vault.update_async(&key("a"), |_| ()))
        .collect();
    assert!(matches!(
        vault.update(&key("a"), |_| ()),
        Err(Error::Overloaded { limit: 16_384, .. })
    ));
    storage.hold(false);
    let runtime = single_threaded();
    runtime.block_on(first).unwrap();
    for pending in waiting {
        runtime.block_on(pending).unwrap();
    }
    vault.update(&key("a"), |_| ()).unwrap();
}

#[test]
fn an_answer_timeout_ends_a_wait_and_not_the_operation() {
    let storage = Arc::new(Faulty::default());
    let builder = Vault::<Number>::builder("numbers").storage(Arc::clone(&storage));
    let vault = builder.answer_timeout(Duration::from_millis(20)).open();
    // Nobody knows how long opening takes, so it is not under the timeout.
    let vault = vault.unwrap();
    storage.hold(true);
    let unknown = |result: Result<u64, Error>| {
        let unknown = matches!(
            result,
            Err(Error::Unavailable {
                applied: Applied::Unknown,
                ..
            })
        );
        assert!(unknown, "{result:?}");
    };
    unknown(increment(&vault, "a"));
    let runtime = single_threaded();
    unknown(runtime.block_on(vault.update_async(&key("a"), |slot| {
        slot.put(Number(10), MINUTE);
        10
    })));
    storage.hold(false);
    drop(vault);
    let again = Vault::<Number>::builder("numbers")
        .storage(storage)
        .open()
        .unwrap();
    assert_eq!(again.get(&key("a")).unwrap(), Some(Number(10)));
}

#[test]
fn close_ends_all_handles_and_loses_nothing() {
    let storage = Arc::new(Faulty::default());
    let open = || {
        Vault::<Number>::builder("numbers")
            .storage(Arc::clone(&storage))
            .open()
            .unwrap()
    };
    let (vault, other) = (open(), open());
    let queued = vault.update_async(&key("a"), |slot| slot.put(Number(4), MINUTE));
    vault.close().unwrap();
    let closed = |result: Result<(), Error>| assert!(matches!(result, Err(Error::Closed { .. })));
    closed(other.update(&key("a"), |_| ()));
    closed(other.get(&key("a")).map(drop));
    closed(other.len().map(drop));
    closed(other.flush());
    closed(other.scan().next().unwrap().map(drop));
    other.close().unwrap();

    let again = open();
    assert_eq!(again.get(&key("a")).unwrap(), Some(Number(4)));
    closed(vault.flush());
    let runtime = single_threaded();
    runtime.block_on(queued).unwrap();
    runtime.block_on(again.close_async()).unwrap();
    runtime.block_on(again.close_async()).unwrap();
    closed(again.flush());
}

#[test]
fn handles_and_futures_can_move_between_threads() {
    fn movable<T: Send + Sync + Clone + 'static>(_: &T) {}
    fn sendable<T: Send + 'static>(_: &T) {}
    let vault = in_memory();
    movable(&vault);
    sendable(&vault.update_async(&key("a"), |_| ()));
}

/// What `act` returns, unless it hangs.
fn in_time<T: Send + 'static>(act: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, result) = mpsc::channel();
    thread::spawn(move || done.send(act()));
    result.recv_timeout(MINUTE).unwrap()
}

#[test]
fn opening_inside_an_update_does_not_hang_while_the_file_closes() {
    let storage = Arc::new(Faulty::default());
    let open = {
        let storage = Arc::clone(&storage);
        move || {
            Vault::<Number>::builder("numbers")
                .storage(Arc::clone(&storage))
                .open()
        }
    };
    let vault = open().unwrap();
    let (closing, is_closing) = mpsc::channel::<()>();
    let open_inside = open.clone();
    let inside = vault.update_async(&key("a"), move |_| {
        is_closing.recv().unwrap();
        open_inside().map(drop)
    });
    let closed = vault.close_async();
    closing.send(()).unwrap();
    let (inside, closed) = in_time(move || {
        let runtime = single_threaded();
        (runtime.block_on(inside), runtime.block_on(closed))
    });
    assert!(matches!(inside.unwrap(), Err(Error::InsideUpdate)));
    closed.unwrap();
    open().unwrap();
}

#[test]
fn a_finished_future_is_pending_for_ever() {
    let vault = in_memory();
    let mut context = Context::from_waker(Waker::noop());
    let mut pending = vault.update_async(&key("a"), |_| 7);
    vault.flush().unwrap();
    assert!(matches!(
        Pin::new(&mut pending).poll(&mut context),
        Poll::Ready(Ok(7))
    ));
    assert!(Pin::new(&mut pending).poll(&mut context).is_pending());
}

/// A waker of somebody who did not think.
struct Bad;

impl Wake for Bad {
    fn wake(self: Arc<Self>) {
        panic!("a waker");
    }
}

#[test]
fn a_waker_that_panics_harms_nobody_else() {
    let storage = Arc::new(Faulty::default());
    let builder = || Vault::<Number>::builder("numbers").storage(Arc::clone(&storage));
    let vault = builder()
        .answer_timeout(Duration::from_millis(50))
        .open()
        .unwrap();
    let other = builder().open().unwrap();
    let bad = Waker::from(Arc::new(Bad));
    let mut context = Context::from_waker(&bad);
    let runtime = single_threaded();
    storage.hold(true);
    let mut theirs = vault.update_async(&key("a"), |slot| slot.put(Number(1), MINUTE));
    storage.until_a_sync_waits();
    assert!(Pin::new(&mut theirs).poll(&mut context).is_pending());
    // Their timeout rings, and ours after it.
    drop(vault.update(&key("a"), |_| ()));
    let late = runtime.block_on(vault.update_async(&key("a"), |_| ()));
    assert!(matches!(late, Err(Error::Unavailable { .. })), "{late:?}");

    let mut closing = other.close_async();
    assert!(Pin::new(&mut closing).poll(&mut context).is_pending());
    let ours = other.close_async();
    storage.hold(false);
    in_time(move || runtime.block_on(ours)).unwrap();
}
