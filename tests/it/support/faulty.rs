//! A storage that fails, blocks and is slow on demand, and that knows what a power cut would leave.

use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ratevault::Storage;

/// The live bytes are what was written; the durable ones are what the last sync left.
#[derive(Debug, Default)]
pub struct Faulty {
    state: Mutex<State>,
    changed: Condvar,
    sync_takes: Duration,
}

#[derive(Debug, Default)]
struct State {
    live: Vec<u8>,
    durable: Vec<u8>,
    failing: bool,
    panicking: bool,
    /// How many more syncs succeed before `failing` begins.
    syncs_left: Option<u64>,
    /// How many more reads succeed before `failing` begins.
    reads_left: Option<u64>,
    held: bool,
    /// How many syncs wait to be let go.
    waiting: u64,
    syncs: u64,
}

impl Faulty {
    pub fn slow(sync_takes: Duration) -> Self {
        Self {
            sync_takes,
            ..Self::default()
        }
    }

    /// A storage that holds `image`.
    pub fn with_image(image: Vec<u8>) -> Self {
        let faulty = Self::default();
        *faulty.lock() = State {
            live: image.clone(),
            durable: image,
            ..State::default()
        };
        faulty
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on every call fails, or works again.
    pub fn fail(&self, failing: bool) {
        let mut state = self.lock();
        state.failing = failing;
        state.syncs_left = None;
        state.reads_left = None;
    }

    /// From now on every call panics, or works again.
    pub fn panic(&self, panicking: bool) {
        self.lock().panicking = panicking;
    }

    /// Somebody empties it.
    pub fn empty(&self) {
        self.lock().live.clear();
    }

    /// After `count` more syncs every call fails.
    pub fn fail_after_syncs(&self, count: u64) {
        self.lock().syncs_left = Some(count);
    }

    /// After `count` more reads every call fails.
    pub fn fail_after_reads(&self, count: u64) {
        self.lock().reads_left = Some(count);
    }

    /// From now on syncs wait, or go on.
    pub fn hold(&self, held: bool) {
        self.lock().held = held;
        self.changed.notify_all();
    }

    /// Returns once a sync waits.
    pub fn until_a_sync_waits(&self) {
        let state = self.lock();
        drop(
            self.changed
                .wait_while(state, |state| state.waiting == 0)
                .unwrap(),
        );
    }

    pub fn syncs(&self) -> u64 {
        self.lock().syncs
    }

    /// What a power cut would leave: all that was synced, nothing that was not.
    pub fn durable_image(&self) -> Vec<u8> {
        self.lock().durable.clone()
    }

    fn working(&self) -> io::Result<MutexGuard<'_, State>> {
        let state = self.lock();
        assert!(!state.panicking, "injected\nin two lines");
        if state.failing {
            return Err(io::Error::other("injected"));
        }
        Ok(state)
    }
}

fn range(offset: u64, length: usize) -> std::ops::Range<usize> {
    let start = offset as usize;
    start..start + length
}

impl Storage for Faulty {
    fn len(&self) -> io::Result<u64> {
        Ok(self.working()?.live.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let mut state = self.working()?;
        match &mut state.reads_left {
            Some(0) => {
                state.failing = true;
                return Err(io::Error::other("injected"));
            }
            Some(left) => *left -= 1,
            None => {}
        }
        let bytes = state.live.get(range(offset, out.len()));
        out.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut state = self.working()?;
        let place = state.live.get_mut(range(offset, data.len()));
        place
            .ok_or(io::ErrorKind::UnexpectedEof)?
            .copy_from_slice(data);
        Ok(())
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        self.working()?.live.resize(length as usize, 0);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        if !self.sync_takes.is_zero() {
            std::thread::sleep(self.sync_takes);
        }
        let mut state = self.working()?;
        if state.held {
            state.waiting += 1;
            self.changed.notify_all();
            state = self.changed.wait_while(state, |state| state.held).unwrap();
            state.waiting -= 1;
        }
        match &mut state.syncs_left {
            Some(0) => {
                state.failing = true;
                return Err(io::Error::other("injected"));
            }
            Some(left) => *left -= 1,
            None => {}
        }
        state.durable = state.live.clone();
        state.syncs += 1;
        Ok(())
    }
}
