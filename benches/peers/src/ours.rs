//! The limiter of this crate, as it is used here.

use std::path::Path;
use std::thread;
use std::time::Duration;

use ratevault::{Durability, Limiter, Quota, SlidingWindow, Vault};

use crate::load::Limit;
use crate::report::Flushing;

pub(crate) const FLUSH_EVERY: Duration = Duration::from_millis(100);

/// No flush in the time of a run.
pub(crate) const RARELY: Duration = Duration::from_secs(3_600);

const ENDPOINT: &str = "login";

pub(crate) struct Ours {
    pub(crate) limiter: Limiter<SlidingWindow>,
    flush_every: Option<Duration>,
}

impl Ours {
    /// With default settings, but for room for two million clients.
    pub(crate) fn open(path: &Path, durability: Durability, quota: Quota) -> Self {
        let vault = Vault::builder("limits")
            .path(path)
            .max_keys(2_000_000)
            .durability(durability)
            .open()
            .expect("a vault");
        Self {
            limiter: Limiter::new(vault, SlidingWindow::new(quota).expect("a small limit")),
            flush_every: match durability {
                Durability::Buffered { flush_every } => Some(flush_every),
                _ => None,
            },
        }
    }

    pub(crate) fn buffered(path: &Path, flush_every: Duration, quota: Quota) -> Self {
        Self::open(path, Durability::Buffered { flush_every }, quota)
    }

    /// As this one, with another quota for the same clients.
    pub(crate) fn with(&self, quota: Quota) -> Self {
        let window = SlidingWindow::new(quota).expect("a small limit");
        Self {
            limiter: Limiter::new(self.limiter.vault().clone(), window),
            flush_every: self.flush_every,
        }
    }

    #[inline(always)]
    pub(crate) fn check(&self, client: &str) -> bool {
        let decision = self.limiter.check(ENDPOINT, client);
        decision.expect("a decision").is_allowed()
    }

    pub(crate) fn check_all<'c>(&self, clients: impl IntoIterator<Item = &'c String>) {
        for client in clients {
            self.check(client);
        }
    }

    /// Blocks until nothing is left to flush.
    pub(crate) fn flush(&self) {
        let vault = self.limiter.vault();
        vault.flush().expect("a disk that works");
        while vault.stats().expect("counters").oldest_unflushed.is_some() {
            thread::sleep(Duration::from_millis(1));
        }
    }

    pub(crate) fn close(&self) {
        let closed = self.limiter.vault().close();
        closed.expect("a disk that works");
    }

    /// How many flushes were completed since it was opened.
    pub(crate) fn flushes(&self) -> u64 {
        self.limiter.vault().stats().expect("counters").flushes
    }

    /// What was flushed since it was opened.
    pub(crate) fn flushing(&self) -> Flushing {
        let stats = self.limiter.vault().stats().expect("counters");
        let failed = stats.last_flush_error;
        assert!(failed.is_none(), "the last flush failed: {failed:?}");
        Flushing {
            every: self.flush_every.unwrap_or_default(),
            flushes: stats.flushes,
            rows_flushed: stats.rows_flushed,
            on_disk: stats.rows,
        }
    }
}

impl Limit for Ours {
    type Hand = ();

    fn hand(&self) {}

    #[inline(always)]
    fn allows(&self, (): &mut (), client: &String) -> bool {
        self.check(client)
    }

    fn batch(&self) -> u64 {
        // A committed check is one of few.
        if self.flush_every.is_some() { 256 } else { 1 }
    }
}

pub(crate) fn quota(limit: u32, window: Duration) -> Quota {
    Quota::new(limit, window).expect("a quota")
}
