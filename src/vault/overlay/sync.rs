//! The locks of the overlay. They do not poison: nothing under them is left half done by a panic.
//!
//! They are held for less than a microsecond, mostly: whoever comes meanwhile had better spin than
//! sleep. The tests of its locking run the overlay on those of `shuttle`, which tries out orders of
//! events.

#[cfg(not(all(test, shuttle)))]
mod chosen {
    pub(in super::super) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

    pub(in super::super) use parking_lot::{Condvar, Mutex, MutexGuard};

    pub(in super::super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock()
    }

    pub(in super::super) fn wait<'m, T>(
        condvar: &Condvar,
        mut guard: MutexGuard<'m, T>,
    ) -> MutexGuard<'m, T> {
        condvar.wait(&mut guard);
        guard
    }
}

#[cfg(all(test, shuttle))]
mod chosen {
    use std::sync::PoisonError;

    pub(in super::super) use shuttle::sync::{
        Condvar, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    };

    pub(in super::super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(in super::super) fn wait<'m, T>(
        condvar: &Condvar,
        guard: MutexGuard<'m, T>,
    ) -> MutexGuard<'m, T> {
        condvar.wait(guard).unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) use chosen::*;
