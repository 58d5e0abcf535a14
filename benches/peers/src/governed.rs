//! `governor`'s keyed limiter, with its default store.

use std::num::NonZeroU32;
use std::time::Duration;

use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};

use crate::load::Limit;

pub(crate) struct Governed(DefaultKeyedRateLimiter<String>);

impl Governed {
    /// The same rate as `limit` hits per `window`, and as many at once.
    pub(crate) fn new(limit: u32, window: Duration) -> Self {
        let limit = NonZeroU32::new(limit).expect("a limit");
        let quota = Quota::with_period(window / limit.get()).expect("a window");
        Self(RateLimiter::keyed(quota.allow_burst(limit)))
    }

    #[inline(always)]
    pub(crate) fn check(&self, client: &String) -> bool {
        self.0.check_key(client).is_ok()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

impl Limit for Governed {
    type Hand = ();

    fn hand(&self) {}

    #[inline(always)]
    fn allows(&self, (): &mut (), client: &String) -> bool {
        self.check(client)
    }

    fn batch(&self) -> u64 {
        256
    }
}
