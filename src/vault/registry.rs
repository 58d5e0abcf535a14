//! The registry: which files this process has open, so that all vaults on one file share it.
//!
//! A file is known by its identity (device and inode), not by its path. Each has a slot from when
//! it is being opened until it is closed. Whoever finds one waits until it is open or gone, and
//! then looks again; the registry's own lock covers adding and removing slots alone.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

use super::file::{OpenFile, Shared};
use super::open::Source;
use super::settings::{FileSettings, Wanted};
use super::stamp::Expected;
use crate::error::Result;

/// What tells one place of storage from another.
#[derive(Debug, PartialEq, Eq, Hash)]
enum Identity {
    File(Arc<same_file::Handle>),
    /// The address of a storage, kept alive by whoever opens it or has it open.
    Private(usize),
}

static SLOTS: LazyLock<Mutex<HashMap<Arc<Identity>, Arc<Slot>>>> = LazyLock::new(Mutex::default);

fn slots() -> MutexGuard<'static, HashMap<Arc<Identity>, Arc<Slot>>> {
    SLOTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where one file stands.
#[derive(Debug)]
pub(super) struct Slot {
    identity: Arc<Identity>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
enum State {
    Opening,
    /// Open until it is closed or its last handle is dropped, and closing from then on.
    Open {
        handles: Weak<OpenFile>,
        shared: Weak<Shared>,
    },
    /// No longer in the registry: another slot may have its place.
    Gone,
}

/// The open file of `source`, opened if no handle has it open.
pub(super) fn open(
    source: Source,
    wanted: &Wanted,
    expected: Expected<'_>,
) -> Result<Arc<OpenFile>> {
    let path = source.path();
    let slot = loop {
        match Slot::of(&source) {
            Found::Ours(slot) => break slot,
            Found::Others(slot) => {
                if let Some(file) = slot.wait() {
                    file.shared().settings.check(wanted, &path)?;
                    return Ok(file);
                }
            }
        }
    };
    let opening = Opening(&slot);
    let settings = FileSettings::new(wanted);
    let file = Arc::new(OpenFile::new(
        source,
        settings,
        expected,
        Arc::downgrade(&slot),
    )?);
    opening.done(&file);
    Ok(file)
}

/// A slot, and whose it is to fill.
enum Found {
    Ours(Arc<Slot>),
    Others(Arc<Slot>),
}

impl Slot {
    /// The slot of `source`; the caller's to fill if there was none.
    fn of(source: &Source) -> Found {
        let identity = match source {
            Source::File { identity, .. } => Identity::File(Arc::clone(identity)),
            Source::Private(storage) => Identity::Private(Arc::as_ptr(storage).addr()),
        };
        let mut slots = slots();
        if let Some(slot) = slots.get(&identity) {
            return Found::Others(Arc::clone(slot));
        }
        let identity = Arc::new(identity);
        let slot = Arc::new(Self {
            identity: Arc::clone(&identity),
            state: Mutex::new(State::Opening),
            changed: Condvar::new(),
        });
        slots.insert(identity, Arc::clone(&slot));
        Found::Ours(slot)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file once it is open; `None` once the slot is gone.
    fn wait(&self) -> Option<Arc<OpenFile>> {
        let mut state = self.lock();
        loop {
            match &*state {
                State::Gone => return None,
                State::Opening => {}
                State::Open { handles, shared } => {
                    let serves = |shared: Arc<Shared>| !shared.queue.is_closing();
                    // Asked before a handle is taken: if that became the last one here, dropping
                    // it would wait for a writer that waits for this lock.
                    if shared.upgrade().is_some_and(serves)
                        && let Some(file) = handles.upgrade()
                    {
                        return Some(file);
                    }
                }
            }
            let woken = self.changed.wait(state);
            state = woken.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Lets the next one in, who makes a slot of its own.
    pub(super) fn vacate(&self) {
        slots().remove(&self.identity);
        *self.lock() = State::Gone;
        self.changed.notify_all();
    }
}

/// Vacates the slot unless the file was opened.
struct Opening<'a>(&'a Slot);

impl Opening<'_> {
    fn done(self, file: &Arc<OpenFile>) {
        *self.0.lock() = State::Open {
            handles: Arc::downgrade(file),
            shared: Arc::downgrade(file.shared()),
        };
        self.0.changed.notify_all();
        std::mem::forget(self);
    }
}

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        self.0.vacate();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    use super::*;
    use crate::vault::MemoryStorage;

    /// As files do it: the opener lets go of the slot, and the writer vacates it through a weak
    /// reference, while others wait for it.
    #[test]
    fn a_slot_is_filled_by_one_at_a_time() {
        let source = Source::Private(Arc::new(MemoryStorage::default()));
        let filled = AtomicUsize::new(0);
        let fill = || {
            for _ in 0..2_000 {
                let slot = loop {
                    match Slot::of(&source) {
                        Found::Ours(slot) => break slot,
                        Found::Others(slot) => assert!(slot.wait().is_none()),
                    }
                };
                assert_eq!(filled.fetch_add(1, Ordering::SeqCst), 0);
                let kept_by_the_registry = Arc::downgrade(&slot);
                drop(slot);
                thread::yield_now();
                let slot = kept_by_the_registry.upgrade().expect("it is occupied");
                filled.fetch_sub(1, Ordering::SeqCst);
                slot.vacate();
            }
        };
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(fill);
            }
        });
        assert!(matches!(Slot::of(&source), Found::Ours(_)));
    }
}
