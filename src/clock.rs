//! Time: instants in whole milliseconds, and the clocks that tell them.
//!
//! Lies below every other module. Hits and deadlines are dated with [`Clock::now`]; lock timeouts
//! and back-offs are not, they follow the system's monotonic time.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, SystemTime};

/// An instant: whole milliseconds since the Unix epoch.
///
/// Arithmetic saturates.
///
/// ```
/// use ratevault::Timestamp;
/// use std::time::Duration;
///
/// let hit = Timestamp::from_millis(1_000);
/// let later = hit.saturating_add(Duration::from_secs(2));
/// assert_eq!(later.as_millis(), 3_000);
/// assert_eq!(later.saturating_since(hit), Duration::from_secs(2));
/// assert_eq!(hit.saturating_since(later), Duration::ZERO);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The instant `ms` milliseconds after the Unix epoch.
    #[must_use]
    pub const fn from_millis(ms: u64) -> Self {
        Self(ms)
    }

    /// Milliseconds since the Unix epoch.
    #[must_use]
    pub const fn as_millis(self) -> u64 {
        self.0
    }

    /// This instant and `span` more; a part of a millisecond is dropped.
    #[must_use]
    pub fn saturating_add(self, span: Duration) -> Self {
        Self(self.0.saturating_add(whole_millis(span)))
    }

    /// This instant on a clock that shows `there` when this one shows `here`.
    ///
    /// Two clocks are not read at the same time: less than a second apart, they agree.
    pub(crate) const fn moved(self, here: Self, there: Self) -> Self {
        if here.0.abs_diff(there.0) < 1_000 {
            return self;
        }
        Self(self.0.saturating_add(there.0).saturating_sub(here.0))
    }

    /// The time from `earlier` to this instant, zero if `earlier` is later.
    #[must_use]
    pub const fn saturating_since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}

/// `span` in whole milliseconds, saturating.
pub(crate) fn whole_millis(span: Duration) -> u64 {
    let whole = span.as_secs().saturating_mul(1_000);
    whole.saturating_add(span.subsec_millis().into())
}

/// `span` in whole seconds, rounded up, saturating.
pub(crate) fn seconds_rounded_up(span: Duration) -> u64 {
    span.as_secs()
        .saturating_add(u64::from(span.subsec_nanos() > 0))
}

/// Where a vault's time comes from.
pub trait Clock: fmt::Debug + Send + Sync + 'static {
    /// The instant that dates hits and deadlines.
    fn now(&self) -> Timestamp;

    /// The instant that people and other machines would call now.
    ///
    /// It may differ from [`now`](Self::now) when the system's time was set while running.
    fn wall(&self) -> Timestamp {
        self.now()
    }

    /// Whether it is moved by time alone, so that a reading may serve for some microseconds.
    /// Default: false.
    fn follows_time(&self) -> bool {
        false
    }

    /// Asks for `waiter` to be told whenever the clock is moved by hand.
    ///
    /// Whoever waits for an instant of this clock sleeps for as long as it is away and then looks
    /// again, so a clock that simply follows time has nothing to do here.
    fn wake_on_change(&self, waiter: Weak<dyn ClockWaiter>) {
        drop(waiter);
    }
}

/// Someone who waits for an instant of a clock.
pub trait ClockWaiter: Send + Sync {
    /// The clock was moved: look at it again.
    fn clock_moved(&self);
}

/// The default clock: read once from the wall clock, then steady.
///
/// The wall clock is read once per process. From then on `now` follows `CLOCK_BOOTTIME` where
/// there is one (Linux, Android), else the monotonic clock: setting the system's time does
/// nothing while the process runs, and on Linux a suspend counts as time that passed.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        static START: OnceLock<(Timestamp, u64)> = OnceLock::new();
        let (wall, start) = START.get_or_init(|| (wall_clock(), uptime_ms()));
        Timestamp(wall.0 + uptime_ms().saturating_sub(*start))
    }

    fn wall(&self) -> Timestamp {
        wall_clock()
    }

    fn follows_time(&self) -> bool {
        true
    }
}

fn wall_clock() -> Timestamp {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    Timestamp(since.map_or(0, whole_millis))
}

/// A reading of the steadiest clock the platform has, in whole ms.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn uptime_ms() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let ms = time.tv_sec.saturating_mul(1_000) + time.tv_nsec / 1_000_000;
    u64::try_from(ms).unwrap_or(0)
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn uptime_ms() -> u64 {
    static BORN: OnceLock<std::time::Instant> = OnceLock::new();
    whole_millis(BORN.get_or_init(std::time::Instant::now).elapsed())
}

/// A clock that stands still until it is moved, for tests and replays. It may go back.
///
/// ```
/// use ratevault::{Limiter, ManualClock, Quota, SlidingWindow, Timestamp, Vault};
/// use std::sync::Arc;
/// use std::time::Duration;
///
/// let clock = Arc::new(ManualClock::new(Timestamp::from_millis(0)));
/// let vault = Vault::builder("rate_limits").in_memory().clock(clock.clone()).open()?;
/// let limiter = Limiter::new(vault, SlidingWindow::new(Quota::per_minute(1)?)?);
///
/// assert!(limiter.check("login", "ada")?.is_allowed());
/// clock.advance(Duration::from_secs(60));
/// assert!(limiter.check("login", "ada")?.is_allowed());
/// # Ok::<(), ratevault::Error>(())
/// ```
#[derive(Default)]
pub struct ManualClock {
    now: AtomicU64,
    waiters: Mutex<Vec<Weak<dyn ClockWaiter>>>,
}

impl ManualClock {
    /// A clock that shows `now`.
    #[must_use]
    pub fn new(now: Timestamp) -> Self {
        Self {
            now: AtomicU64::new(now.0),
            waiters: Mutex::default(),
        }
    }

    /// Moves the clock to `now`, forward or back, and wakes who waits on it.
    pub fn set(&self, now: Timestamp) {
        self.now.store(now.0, Ordering::SeqCst);
        self.wake_all();
    }

    /// Moves the clock forward by `span`, saturating; a part of a millisecond is dropped.
    pub fn advance(&self, span: Duration) {
        let step = whole_millis(span);
        let moved = |now: u64| Some(now.saturating_add(step));
        let _ = self
            .now
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, moved);
        self.wake_all();
    }

    fn wake_all(&self) {
        let waiters = self.waiters.lock().unwrap_or_else(PoisonError::into_inner);
        let live: Vec<_> = waiters.iter().filter_map(Weak::upgrade).collect();
        drop(waiters);
        live.iter().for_each(|waiter| waiter.clock_moved());
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Timestamp(self.now.load(Ordering::SeqCst))
    }

    fn wake_on_change(&self, waiter: Weak<dyn ClockWaiter>) {
        let mut waiters = self.waiters.lock().unwrap_or_else(PoisonError::into_inner);
        waiters.retain(|known| known.strong_count() > 0);
        waiters.push(waiter);
    }
}

impl fmt::Debug for ManualClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ManualClock").field(&self.now()).finish()
    }
}
