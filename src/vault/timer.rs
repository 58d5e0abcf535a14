//! Alarms for futures, on any executor: one small thread per process, started when first needed.
//!
//! The writer cannot do this, as it may be what hangs, and no executor's timer can be assumed.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Waker};
use std::thread;
use std::time::{Duration, Instant};

use super::writer::shielded;

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
    /// Until when the timer sleeps; `None`: until it is woken.
    sleeps_until: Option<Instant>,
}

/// Wakes a task once its time has come.
#[derive(Debug)]
pub(crate) struct Alarm {
    at: Instant,
    id: Option<Id>,
}

impl Alarm {
    pub(crate) fn new(after: Duration) -> Self {
        let now = Instant::now();
        let far = Duration::from_secs(365 * 24 * 3_600);
        Self {
            at: now.checked_add(after).unwrap_or_else(|| now + far),
            id: None,
        }
    }

    /// Whether its time has come; if not, the task is woken when it has.
    pub(crate) fn has_rung(&mut self, context: &Context<'_>) -> bool {
        if Instant::now() >= self.at {
            return true;
        }
        // Cloning and dropping a waker is other people's code: never under the lock.
        let waker = context.waker().clone();
        let timer = timer();
        let mut alarms = timer.lock();
        let id = *self.id.get_or_insert_with(|| {
            alarms.last += 1;
            (self.at, alarms.last)
        });
        let replaced = alarms.set.insert(id, waker);
        // Mostly it sleeps for an alarm that was set before, and is gone by now.
        let would_sleep_on = alarms.sleeps_until.is_none_or(|until| self.at < until);
        drop(alarms);
        drop(replaced);
        if would_sleep_on {
            timer.changed.notify_one();
        }
        false
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            let mut alarms = timer().lock();
            let removed = alarms.set.remove(&id);
            drop(alarms);
            drop(removed);
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
            alarms.sleeps_until = alarms.set.first_key_value().map(|(first, _)| first.0);
            alarms = match alarms.set.first_entry() {
                None => self
                    .changed
                    .wait(alarms)
                    .unwrap_or_else(PoisonError::into_inner),
                Some(first) if first.key().0 <= now => {
                    let waker = first.remove();
                    drop(alarms);
                    shielded(|| waker.wake());
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
    use std::sync::{Arc, mpsc};
    use std::task::Wake;

    /// Says that it was rung, then does what it was told.
    struct Bell(mpsc::SyncSender<()>, fn());

    impl Wake for Bell {
        fn wake(self: Arc<Self>) {
            let _ = self.0.try_send(());
            self.1();
        }
    }

    fn bell(then: fn()) -> (Waker, mpsc::Receiver<()>) {
        let (sender, rings) = mpsc::sync_channel(1);
        (Waker::from(Arc::new(Bell(sender, then))), rings)
    }

    fn soon() -> Alarm {
        Alarm::new(Duration::from_millis(10))
    }

    #[test]
    fn an_alarm_rings_in_time_and_a_dropped_one_does_not() {
        let (waker, rings) = bell(|| ());
        let mut alarm = soon();
        assert!(!alarm.has_rung(&Context::from_waker(&waker)));
        rings.recv().expect("it rings");
        assert!(alarm.has_rung(&Context::from_waker(&waker)));

        let (waker, rings) = bell(|| ());
        let mut dropped = soon();
        let mut never = Alarm::new(Duration::MAX);
        assert!(!dropped.has_rung(&Context::from_waker(&waker)));
        assert!(!never.has_rung(&Context::from_waker(&waker)));
        drop((dropped, never, waker));
        // Nobody holds the bell any more.
        assert!(rings.recv().is_err());
    }

    #[test]
    fn a_waker_that_panics_does_not_end_the_timer() {
        let (waker, rings) = bell(|| panic!("a waker"));
        let mut alarm = soon();
        assert!(!alarm.has_rung(&Context::from_waker(&waker)));
        rings.recv().expect("it rings");
        let (waker, rings) = bell(|| ());
        let mut next = soon();
        assert!(!next.has_rung(&Context::from_waker(&waker)));
        rings.recv().expect("the next one rings");
    }

    /// A task that owns an alarm of its own.
    struct Owner {
        _alarm: Mutex<Alarm>,
    }

    impl Wake for Owner {
        fn wake(self: Arc<Self>) {}
    }

    #[test]
    fn a_waker_may_own_another_alarm() {
        let (waker, _rings) = bell(|| ());
        let context = Context::from_waker(&waker);
        let mut owned = Alarm::new(Duration::MAX);
        assert!(!owned.has_rung(&context));
        let owner = Waker::from(Arc::new(Owner {
            _alarm: Mutex::new(owned),
        }));
        let mut alarm = Alarm::new(Duration::MAX);
        assert!(!alarm.has_rung(&Context::from_waker(&owner)));
        drop(owner);
        // The timer drops the last reference to the owner, and that its alarm.
        assert!(!alarm.has_rung(&context));
    }
}
