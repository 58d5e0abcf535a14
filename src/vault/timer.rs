//! Alarms for futures, on any executor: one small thread per process, started when first needed.
//!
//! The writer cannot do this, as it may be what hangs, and no executor's timer can be assumed.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Waker};
use std::thread;
use std::time::{Duration, Instant};

/// When it rings, and a number that tells alarms of one instant apart.
type Id = (Instant, u64);

#[derive(Debug, Default)]
struct Timer {
    alarms: Mutex<Alarms>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Alarms {
    set: BTreeMap<Id, Waker>,
    last: u64,
}

/// Wakes a task once its time has come.
#[derive(Debug)]
pub(super) struct Alarm {
    at: Instant,
    id: Option<Id>,
}

impl Alarm {
    pub(super) fn new(after: Duration) -> Self {
        let now = Instant::now();
        let far = Duration::from_secs(365 * 24 * 3_600);
        Self {
            at: now.checked_add(after).unwrap_or_else(|| now + far),
            id: None,
        }
    }

    /// Whether its time has come; if not, the task is woken when it has.
    pub(super) fn has_rung(&mut self, context: &Context<'_>) -> bool {
        if Instant::now() >= self.at {
            return true;
        }
        let timer = timer();
        let mut alarms = timer.lock();
        let id = *self.id.get_or_insert_with(|| {
            alarms.last += 1;
            (self.at, alarms.last)
        });
        alarms.set.insert(id, context.waker().clone());
        if alarms
            .set
            .first_key_value()
            .is_some_and(|(first, _)| *first == id)
        {
            timer.changed.notify_one();
        }
        false
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            timer().lock().set.remove(&id);
        }
    }
}

fn timer() -> &'static Timer {
    static TIMER: OnceLock<&'static Timer> = OnceLock::new();
    TIMER.get_or_init(|| {
        let timer: &'static Timer = Box::leak(Box::default());
        let thread = thread::Builder::new().name("ratevault-timer".into());
        if let Err(error) = thread.spawn(|| timer.run()) {
            tracing::error!(%error, "no thread for answer timeouts: waits may last longer");
        }
        timer
    })
}

impl Timer {
    fn lock(&self) -> MutexGuard<'_, Alarms> {
        self.alarms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut alarms = self.lock();
        loop {
            let now = Instant::now();
            alarms = match alarms.set.first_entry() {
                None => self
                    .changed
                    .wait(alarms)
                    .unwrap_or_else(PoisonError::into_inner),
                Some(first) if first.key().0 <= now => {
                    let waker = first.remove();
                    drop(alarms);
                    waker.wake();
                    self.lock()
                }
                Some(first) => {
                    let away = first.key().0 - now;
                    let woken = self.changed.wait_timeout(alarms, away);
                    woken.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::mpsc;
    use std::task::Wake;

    struct Bell(Mutex<mpsc::Sender<()>>);

    impl Wake for Bell {
        fn wake(self: Arc<Self>) {
            let _ = self.0.lock().expect("a sender").send(());
        }
    }

    #[test]
    fn alarms_ring_and_dropped_ones_do_not() {
        let (sender, rings) = mpsc::channel();
        let waker = Waker::from(Arc::new(Bell(Mutex::new(sender))));
        let context = Context::from_waker(&waker);

        let mut never = Alarm::new(Duration::MAX);
        let mut dropped = Alarm::new(Duration::from_millis(1));
        let mut rung = Alarm::new(Duration::from_millis(20));
        assert!(!never.has_rung(&context));
        assert!(!rung.has_rung(&context));
        let due = dropped.has_rung(&context);
        drop(dropped);
        let first = rings.recv();
        assert_eq!(first, Ok(()), "due at once: {due}");
        while !rung.has_rung(&context) {
            rings.recv().expect("rings");
        }
        assert!(!timer().lock().set.is_empty());
        drop((never, rung));
        assert!(timer().lock().set.is_empty());
    }
}
