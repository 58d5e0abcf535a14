//! A storage that fails, tears, blocks and is slow on demand, and that knows what a power cut would
//! leave.

use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ratevault::Storage;

use super::power_cut::{Chance, Change, PowerCut};

/// What Unix calls a failing disk and a full one.
const EIO: i32 = 5;
const ENOSPC: i32 = 28;

/// The live bytes are what was written; the durable ones are what the last sync left.
#[derive(Debug, Default)]
pub struct Faulty {
    state: Mutex<State>,
    changed: Condvar,
    sync_takes: Duration,
}

/// What may happen at one call of the storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// From this call on all fail with EIO.
    Io,
    /// From this call on all that may need room fail with ENOSPC.
    Full,
    /// A part of this write or sync is done; then all calls fail with EIO. What a sync did not do is
    /// forgotten: a later one that succeeds does not make up for it.
    Torn,
    /// This call waits until it is let go.
    Delayed,
}

/// One call of the storage.
#[derive(Clone, Copy, Debug)]
enum Call<'d> {
    Len,
    Read,
    Write(u64, &'d [u8]),
    SetLen(u64),
    Sync,
}

/// A fault that is still to come.
#[derive(Clone, Copy, Debug)]
struct Plan {
    fault: Fault,
    /// Before it, so many calls that it could strike are spared.
    spared: u64,
    seed: u64,
}

#[derive(Debug, Default)]
struct State {
    live: Vec<u8>,
    durable: Vec<u8>,
    /// What the next sync makes durable.
    unsynced: Vec<Change>,
    plan: Option<Plan>,
    has_struck: bool,
    /// The moment at which the planned fault struck.
    power_cut: Option<PowerCut>,
    delaying: bool,
    /// Nobody waits who would give up: a delay ends at once.
    impatient: bool,
    failing: bool,
    /// As `failing`, by a planned fault.
    dead: bool,
    full: bool,
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

    /// A storage on which `fault` strikes once, after `spared` calls that it could have struck.
    pub fn with_fault(fault: Fault, spared: u64) -> Self {
        let faulty = Self::default();
        faulty.lock().plan = Some(Plan {
            fault,
            spared,
            seed: spared,
        });
        faulty
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on every call fails, or works again.
    pub fn fail(&self, failing: bool) {
        let mut state = self.lock();
        state.failing = failing;
        state.dead = false;
        state.full = false;
        state.syncs_left = None;
        state.reads_left = None;
    }

    /// From now on every call panics, or works again.
    pub fn panic(&self, panicking: bool) {
        self.lock().panicking = panicking;
    }

    /// Somebody empties it.
    pub fn empty(&self) {
        let mut state = self.lock();
        state.live.clear();
        state.unsynced.push(Change::SetLen(0));
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

    /// Lets the delayed call go on.
    pub fn let_go(&self) {
        self.lock().delaying = false;
        self.changed.notify_all();
    }

    /// Runs `act`, which waits for the storage for as long as it takes, so that no call may be
    /// delayed.
    pub fn untimed<T>(&self, act: impl FnOnce() -> T) -> T {
        self.lock().impatient = true;
        self.let_go();
        let done = act();
        self.lock().impatient = false;
        done
    }

    pub fn syncs(&self) -> u64 {
        self.lock().syncs
    }

    /// What a power cut would leave: all that was synced, nothing that was not.
    pub fn durable_image(&self) -> Vec<u8> {
        self.lock().durable.clone()
    }

    /// Whether the planned fault has struck.
    pub fn has_struck(&self) -> bool {
        self.lock().has_struck
    }

    /// Whether no call is failed or delayed at the moment.
    pub fn is_well(&self) -> bool {
        let state = self.lock();
        !(state.failing || state.dead || state.full || state.delaying)
    }

    /// The moment at which the planned fault struck, if nobody took it yet.
    pub fn take_power_cut(&self) -> Option<PowerCut> {
        self.lock().power_cut.take()
    }

    /// The power is cut: the storage as it is found afterwards, the planned fault still to come. This
    /// one spares whoever still has it.
    pub fn after_power_cut(&self) -> Self {
        let mut state = self.lock();
        let plan = state.plan.take();
        let cut = PowerCut {
            durable: state.durable.clone(),
            unsynced: state.unsynced.clone(),
        };
        let mut chance = Chance(plan.map_or(0, |plan| plan.seed));
        let after = Self::with_image(cut.torn(&mut chance));
        let mut found = after.lock();
        found.plan = plan;
        found.has_struck = state.has_struck;
        found.power_cut = state.power_cut.take();
        drop(found);
        after
    }

    /// Whether the call may be done, and a planned fault if its time has come.
    fn calling(&self, call: Call<'_>) -> io::Result<MutexGuard<'_, State>> {
        let mut state = self.lock();
        assert!(!state.panicking, "injected\nin two lines");
        state.strike_if_due(call);
        if state.delaying {
            let done = self.changed.wait_while(state, |state| state.delaying);
            state = done.unwrap();
        }
        if state.failing {
            return Err(injected());
        }
        if state.dead {
            return Err(io::Error::from_raw_os_error(EIO));
        }
        if state.full && state.takes_room(call) {
            return Err(io::Error::from_raw_os_error(ENOSPC));
        }
        Ok(state)
    }
}

fn injected() -> io::Error {
    io::Error::other("injected")
}

impl State {
    fn takes_room(&self, call: Call<'_>) -> bool {
        match call {
            Call::Len | Call::Read => false,
            Call::Write(..) | Call::Sync => true,
            Call::SetLen(length) => length > self.live.len() as u64,
        }
    }

    fn strike_if_due(&mut self, call: Call<'_>) {
        let Some(plan) = &mut self.plan else {
            return;
        };
        let Plan { fault, seed, .. } = *plan;
        let can_strike = match fault {
            Fault::Io | Fault::Delayed => true,
            Fault::Torn => matches!(call, Call::Write(..) | Call::Sync),
            Fault::Full => self.takes_room(call),
        };
        match &mut self.plan {
            Some(plan) if can_strike && plan.spared > 0 => plan.spared -= 1,
            Some(_) if can_strike => {
                self.plan = None;
                self.strike(fault, call, seed);
            }
            _ => {}
        }
    }

    fn strike(&mut self, fault: Fault, call: Call<'_>, seed: u64) {
        let under_way = match (fault, call) {
            (Fault::Io | Fault::Full, _) => None,
            (_, Call::Write(offset, data)) => Some(change(offset, data)),
            (_, Call::SetLen(length)) => Some(Change::SetLen(length as usize)),
            (_, Call::Len | Call::Read | Call::Sync) => None,
        };
        self.has_struck = true;
        self.power_cut = Some(PowerCut {
            durable: self.durable.clone(),
            unsynced: self.unsynced.iter().cloned().chain(under_way).collect(),
        });
        match fault {
            Fault::Io => self.dead = true,
            Fault::Full => self.full = true,
            Fault::Delayed => self.delaying = !self.impatient,
            Fault::Torn => {
                self.tear(call, &mut Chance(seed));
                self.dead = true;
            }
        }
    }

    fn tear(&mut self, call: Call<'_>, chance: &mut Chance) {
        match call {
            Call::Write(offset, data) => {
                let begun = change(offset, &data[..chance.below(data.len())]);
                begun.apply(&mut self.live);
                self.unsynced.push(begun);
            }
            Call::Sync => {
                let unsynced = std::mem::take(&mut self.unsynced);
                let is_done = |change: &Change| match change {
                    Change::SetLen(_) => true,
                    Change::Write { .. } => chance.below(2) == 0,
                };
                let done: Vec<_> = unsynced.into_iter().filter(is_done).collect();
                done.iter()
                    .for_each(|change| change.apply(&mut self.durable));
            }
            Call::Len | Call::Read | Call::SetLen(_) => {}
        }
    }
}

fn change(offset: u64, data: &[u8]) -> Change {
    Change::Write {
        offset: offset as usize,
        data: data.to_vec(),
    }
}

fn range(offset: u64, length: usize) -> std::ops::Range<usize> {
    let start = offset as usize;
    start..start + length
}

impl Storage for Faulty {
    fn len(&self) -> io::Result<u64> {
        Ok(self.calling(Call::Len)?.live.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let mut state = self.calling(Call::Read)?;
        match &mut state.reads_left {
            Some(0) => {
                state.failing = true;
                return Err(injected());
            }
            Some(left) => *left -= 1,
            None => {}
        }
        let bytes = state.live.get(range(offset, out.len()));
        out.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut state = self.calling(Call::Write(offset, data))?;
        let place = state.live.get_mut(range(offset, data.len()));
        place
            .ok_or(io::ErrorKind::UnexpectedEof)?
            .copy_from_slice(data);
        state.unsynced.push(change(offset, data));
        Ok(())
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        let mut state = self.calling(Call::SetLen(length))?;
        state.live.resize(length as usize, 0);
        state.unsynced.push(Change::SetLen(length as usize));
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        if !self.sync_takes.is_zero() {
            std::thread::sleep(self.sync_takes);
        }
        let mut state = self.calling(Call::Sync)?;
        if state.held {
            state.waiting += 1;
            self.changed.notify_all();
            state = self.changed.wait_while(state, |state| state.held).unwrap();
            state.waiting -= 1;
        }
        match &mut state.syncs_left {
            Some(0) => {
                state.failing = true;
                return Err(injected());
            }
            Some(left) => *left -= 1,
            None => {}
        }
        let unsynced = std::mem::take(&mut state.unsynced);
        for change in unsynced {
            change.apply(&mut state.durable);
        }
        state.syncs += 1;
        Ok(())
    }
}
