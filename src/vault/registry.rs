//! The registry: which files this process has open, so that all vaults on one file share it.
//!
//! A file is known by its identity (device and inode), not by its path. Each has a slot that is
//! vacant, being opened, or open. Whoever finds a slot being opened or closed waits on that slot;
//! the registry's own lock covers looking up and vacating alone. Lock order: registry, then slot.

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
    Vacant,
    Opening,
    /// Open until it is closed or its last handle is dropped, and closing from then on until it is
    /// vacated.
    Open {
        handles: Weak<OpenFile>,
        shared: Weak<Shared>,
    },
}

/// The open file of `source`, opened if no handle has it open.
pub(super) fn open(
    source: Source,
    wanted: &Wanted,
    expected: Expected<'_>,
) -> Result<Arc<OpenFile>> {
    let path = source.path();
    let slot = Slot::of(&source);
    if let Some(file) = slot.occupy() {
        file.shared().settings.check(wanted, &path)?;
        return Ok(file);
    }
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

impl Slot {
    /// The slot of `source`, made if there is none.
    fn of(source: &Source) -> Arc<Self> {
        let identity = match source {
            Source::File { identity, .. } => Identity::File(Arc::clone(identity)),
            Source::Private(storage) => Identity::Private(Arc::as_ptr(storage).addr()),
        };
        let mut slots = slots();
        if let Some(slot) = slots.get(&identity) {
            return Arc::clone(slot);
        }
        let identity = Arc::new(identity);
        let slot = Arc::new(Self {
            identity: Arc::clone(&identity),
            state: Mutex::new(State::Vacant),
            changed: Condvar::new(),
        });
        slots.insert(identity, Arc::clone(&slot));
        slot
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file if it is open; else the slot is the caller's to fill.
    fn occupy(&self) -> Option<Arc<OpenFile>> {
        let mut state = self.lock();
        loop {
            match &*state {
                State::Vacant => {
                    *state = State::Opening;
                    return None;
                }
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

    /// Lets the next one in; a slot that nobody waits for goes.
    ///
    /// All of it under the registry's lock: between becoming vacant and going, the slot could be
    /// filled again, and the next one would then open the file beside it.
    pub(super) fn vacate(&self) {
        let mut slots = slots();
        *self.lock() = State::Vacant;
        self.changed.notify_all();
        // The map's and the caller's.
        let unwanted = slots
            .get(&self.identity)
            .is_some_and(|slot| Arc::strong_count(slot) <= 2);
        if unwanted {
            slots.remove(&self.identity);
        }
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
