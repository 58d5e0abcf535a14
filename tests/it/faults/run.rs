//! One run of the script with one fault, and what must hold throughout.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use ratevault::{
    Applied, Clock, Durability, Error, HitLog, Key, Limiter, ManualClock, Quota, Result,
    SlidingWindow, Timestamp, Vault, VaultBuilder,
};

use super::model::{FOR_EVER, Model, Rows};
use super::script::{ADA, CLIENTS, Client, LIMIT, MAX_KEYS, SCRIPT, Step};
use crate::support::faulty::{Fault, Faulty};
use crate::support::{START, eventually, single_threaded};

/// How long a call waits for a storage that delays one.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(20);

/// How many steps the script goes on after the fault.
const STEPS_AFTER: usize = 6;

/// What redb writes first into its files, once the rest of an empty one is there.
const MAGIC: &[u8] = b"redb";

/// Goes through the script while `fault` strikes after `spared` calls of the storage. Says what was
/// being done when it did; `None`: the script has fewer calls.
pub fn run(durability: Durability, fault: Fault, spared: u64) -> Option<&'static str> {
    let mut run = Run::new(durability, fault, spared);
    run.step("creating", Run::open);
    let mut steps_left = STEPS_AFTER;
    for step in SCRIPT {
        if run.struck_while.is_some() {
            steps_left -= 1;
        }
        if steps_left == 0 {
            break;
        }
        run.clock.advance(Duration::from_millis(1));
        run.step(name(step), |run| run.act(step));
    }
    run.step("ending", Run::end);
    run.struck_while
}

const fn name(step: Step) -> &'static str {
    match step {
        Step::Check(..) | Step::Burst(_) => "checking",
        Step::Peek(_) => "peeking",
        Step::Reset(_) | Step::ResetEndpoint(_) => "resetting",
        Step::Pass(_) | Step::Sweep => "sweeping",
        Step::Flush => "flushing",
        Step::Reopen => "closing",
        Step::Leave => "dropping",
        Step::PowerCut => "recovering",
    }
}

struct Run {
    durability: Durability,
    fault: Fault,
    seed: u64,
    storage: Arc<Faulty>,
    clock: Arc<ManualClock>,
    limiter: Option<Limiter<SlidingWindow>>,
    model: Model,
    /// The oldest state that a power cut may bring back, of those at the beginning of the step.
    durable: usize,
    doing: &'static str,
    struck_while: Option<&'static str>,
}

fn window() -> SlidingWindow {
    SlidingWindow::new(Quota::per_minute(LIMIT).unwrap()).unwrap()
}

fn builder(storage: &Arc<Faulty>, clock: &Arc<ManualClock>) -> VaultBuilder<HitLog> {
    Vault::builder("rate_limits")
        .storage(Arc::clone(storage))
        .clock(clock.clone())
        .max_keys(MAX_KEYS)
}

/// What a vault holds.
fn rows(vault: &Vault<HitLog>) -> Result<Rows> {
    let row = |entry: Result<ratevault::Entry<HitLog>>| {
        let entry = entry?;
        let text = entry.key.client().to_string();
        let endpoint = entry.key.endpoint();
        let found = |client: &&Client| (client.0, client.1) == (&*endpoint, &*text);
        let client = CLIENTS.iter().find(found);
        Ok((*client.unwrap(), entry.value))
    };
    vault.scan().map(row).collect()
}

/// Whether the operation may have been applied.
fn outcome(error: &Error) -> Applied {
    match error {
        Error::Unavailable { path, applied, .. } if path.as_os_str() == "(private storage)" => {
            *applied
        }
        error => panic!("not the right error: {error:?}"),
    }
}

impl Run {
    fn new(durability: Durability, fault: Fault, spared: u64) -> Self {
        let is_buffered = matches!(durability, Durability::Buffered { .. });
        Self {
            durability,
            fault,
            seed: spared,
            storage: Arc::new(Faulty::with_fault(fault, spared)),
            clock: Arc::new(ManualClock::new(Timestamp::from_millis(START))),
            limiter: None,
            model: Model::new(window(), MAX_KEYS, is_buffered),
            durable: 0,
            doing: "creating",
            struck_while: None,
        }
    }

    fn limiter(&self) -> &Limiter<SlidingWindow> {
        self.limiter.as_ref().unwrap()
    }

    fn is_buffered(&self) -> bool {
        matches!(self.durability, Durability::Buffered { .. })
    }

    fn is_delayed(&self) -> bool {
        self.fault == Fault::Delayed
    }

    /// Does something, and looks at what a power cut in the moment of the fault leaves.
    fn step(&mut self, name: &'static str, act: impl FnOnce(&mut Self)) {
        self.durable = self.model.durable();
        self.doing = name;
        act(self);
        self.look_at_power_cut();
        self.model.trim();
    }

    fn look_at_power_cut(&mut self) {
        if self.storage.has_struck() {
            self.struck_while.get_or_insert(self.doing);
        }
        let Some(cut) = self.storage.take_power_cut() else {
            return;
        };
        let is_vault = cut.durable.starts_with(MAGIC);
        for image in cut.images(self.seed) {
            self.look_at(image, is_vault);
        }
    }

    /// What a power cut leaves now, of what was synced.
    fn look_at_durable(&self) {
        self.look_at(self.storage.durable_image(), true);
    }

    /// What was answered is there, nothing else is, and no row is in the way of the sweep.
    fn look_at(&self, image: Vec<u8>, is_vault: bool) {
        let now = self.clock.now();
        let clock = Arc::new(ManualClock::new(now));
        let vault = builder(&Arc::new(Faulty::with_image(image)), &clock)
            .background_sweep(false)
            .open();
        let vault = match vault {
            // It was initialised in place, as the documentation of `open` says.
            Err(Error::NotAVault { .. } | Error::Corrupt { .. }) if !is_vault => return,
            vault => vault.unwrap(),
        };
        let found = rows(&vault).unwrap();
        let what = format!("after a power cut at {}", self.seed);
        self.model.assert_allows(&found, self.durable, now, &what);
        assert!(vault.len().unwrap() <= MAX_KEYS);
        clock.advance(FOR_EVER);
        vault.sweep().unwrap();
        assert_eq!(vault.len().unwrap(), 0, "a row without a deadline");
    }

    fn act(&mut self, step: Step) {
        let outcome = match step {
            Step::Check(client, cost) => self.check(client, cost),
            Step::Burst(clients) => self.burst(clients),
            Step::Peek(client) => self.peek(client),
            Step::Reset(client) => self.reset(client),
            Step::ResetEndpoint(endpoint) => self.reset_endpoint(endpoint),
            Step::Sweep => self.flush_by(|vault| vault.sweep().map(drop)),
            Step::Flush => self.flush_by(Vault::flush),
            Step::Pass(time) => {
                self.clock.advance(time);
                Ok(())
            }
            Step::Reopen => return self.reopen(),
            Step::Leave => return self.leave(),
            Step::PowerCut => return self.cut_power(),
        };
        if outcome.is_err() {
            self.look_at_power_cut();
            self.recover();
        }
    }

    /// What the model has done since `mark` came to `result`.
    fn settle<T>(&mut self, mark: usize, result: Result<T>) -> Result<T, ()> {
        match result {
            Ok(answer) => {
                self.model.answered();
                Ok(answer)
            }
            Err(error) => {
                assert!(self.is_delayed() || !self.storage.is_well(), "{error}");
                if outcome(&error) == Applied::No {
                    self.model.not_applied(mark);
                }
                Err(())
            }
        }
    }

    fn check(&mut self, client: Client, cost: u32) -> Result<(), ()> {
        let mark = self.model.mark();
        let expected = self.model.check(client, cost, self.clock.now());
        let Client(endpoint, name) = client;
        // A call without blocking is timed also where the row has to be read.
        let found = if self.is_delayed() {
            single_threaded().block_on(self.limiter().check_n_async(endpoint, name, cost))
        } else {
            self.limiter().check_n(endpoint, name, cost)
        };
        let found = self.settle(mark, found)?;
        assert_eq!(found, expected);
        Ok(())
    }

    fn burst(&mut self, clients: &[Client]) -> Result<(), ()> {
        let limiter = self.limiter();
        let pending: Vec<_> = clients
            .iter()
            .map(|Client(endpoint, name)| limiter.check_async(endpoint, *name))
            .collect();
        let runtime = single_threaded();
        let answers = pending.into_iter().map(|pending| runtime.block_on(pending));
        let mut answers: Vec<_> = clients.iter().zip(answers).collect();
        // What failed is the end of the batch; in memory, no client waits for another.
        answers.sort_by_key(|(_, answer)| answer.is_err());
        let mut all = Ok(());
        for (client, answer) in answers {
            let mark = self.model.mark();
            let expected = self.model.check(*client, 1, self.clock.now());
            match self.settle(mark, answer) {
                Ok(found) => assert_eq!(found, expected),
                Err(()) => all = Err(()),
            }
        }
        all
    }

    fn peek(&mut self, client: Client) -> Result<(), ()> {
        let mark = self.model.mark();
        let peek = || self.limiter().peek(client.0, client.1);
        let peeked = self.storage.untimed(peek);
        if let Err(error) = &peeked {
            assert_eq!(outcome(error), Applied::No);
        }
        let expected = self.model.peek(client, self.clock.now());
        let found = self.settle(mark, peeked)?;
        assert_eq!(found, expected);
        Ok(())
    }

    fn reset(&mut self, client: Client) -> Result<(), ()> {
        let mark = self.model.mark();
        self.model.remove(|other| other == client);
        let reset = || self.limiter().reset(client.0, client.1);
        let reset = if self.is_buffered() {
            self.storage.untimed(reset)
        } else {
            reset()
        };
        self.settle(mark, reset).map(drop)
    }

    fn reset_endpoint(&mut self, endpoint: &str) -> Result<(), ()> {
        let mark = self.model.mark();
        self.model.remove(|other| other.0 == endpoint);
        let reset = self.limiter().reset_endpoint(endpoint);
        self.settle(mark, reset)?;
        self.model.flushed();
        Ok(())
    }

    fn flush_by(&mut self, flush: fn(&Vault<HitLog>) -> Result<()>) -> Result<(), ()> {
        let mark = self.model.mark();
        let flushed = flush(self.limiter().vault());
        self.settle(mark, flushed)?;
        self.model.flushed();
        Ok(())
    }

    /// The disk is well again: so is the vault, by itself, and it holds what it should.
    fn recover(&mut self) {
        self.wait_until_well();
        let found = self.logs();
        self.look_at_power_cut();
        let (known, now) = (self.model.known(), self.clock.now());
        self.model.assert_allows(&found, known, now, "recovered");
        self.model.adopt(&found, known);
        self.durable = self.model.durable();
        self.look_at_durable();
    }

    /// Returns once the writer serves again, which it does when the disk is well.
    fn wait_until_well(&self) {
        self.storage.let_go();
        // A further handle is one once the writer has answered, however long that takes. The fault may
        // strike only here.
        let serves = || {
            self.storage.fail(false);
            self.build().open().is_ok()
        };
        eventually("it is well", || self.storage.untimed(serves));
    }

    /// What the vault holds, also in memory.
    fn logs(&mut self) -> Rows {
        let (mut logs, mut is_well) = (Rows::new(), true);
        for client in CLIENTS {
            let key = Key::new(client.0, client.1).unwrap();
            let log = loop {
                let vault = self.limiter().vault();
                match self.storage.untimed(|| vault.get(&key)) {
                    Ok(log) => break log,
                    Err(error) => {
                        // The fault struck at this; it strikes once.
                        assert_eq!(outcome(&error), Applied::No);
                        assert!(std::mem::take(&mut is_well), "{error}");
                        self.look_at_power_cut();
                        self.wait_until_well();
                    }
                }
            };
            logs.extend(log.map(|log| (client, log)));
        }
        logs
    }

    fn open(&mut self) {
        let vault = self.storage.untimed(|| self.build().open());
        let vault = vault.unwrap_or_else(|error| self.open_when_well(&error));
        self.limiter = Some(Limiter::new(vault, window()));
    }

    fn build(&self) -> VaultBuilder<HitLog> {
        let builder = builder(&self.storage, &self.clock).durability(self.durability);
        match self.fault {
            Fault::Delayed => builder.answer_timeout(ANSWER_TIMEOUT),
            // Every page is read from the storage.
            Fault::Io if !self.is_buffered() => builder.cache_bytes(0),
            Fault::Io | Fault::Full | Fault::Torn => builder,
        }
    }

    /// It could not be opened; once the disk is well, it can.
    fn open_when_well(&mut self, error: &Error) -> Vault<HitLog> {
        match error {
            Error::Open { path, .. } => assert_eq!(path.as_os_str(), "(private storage)"),
            error => drop(outcome(error)),
        }
        assert!(!self.storage.is_well(), "{error}");
        self.look_at_power_cut();
        self.storage.fail(false);
        match self.build().open() {
            Err(Error::NotAVault { .. }) if !self.storage.durable_image().starts_with(MAGIC) => {
                // It was initialised in place: somebody has to remove what was begun.
                self.storage.empty();
                self.build().open().unwrap()
            }
            opened => opened.unwrap(),
        }
    }

    fn reopen(&mut self) {
        let closed = self.limiter().vault().close();
        self.model.answered();
        match &closed {
            Ok(()) => self.model.flushed(),
            Err(error) => {
                assert!(self.is_delayed() || !self.storage.is_well(), "{error}");
                assert_eq!(outcome(error), Applied::Unknown);
            }
        }
        self.look_at_power_cut();
        self.doing = "opening";
        self.open_anew();
    }

    fn leave(&mut self) {
        let limiter = self.limiter.take();
        self.storage.untimed(|| drop(limiter));
        if self.storage.is_well() {
            self.model.flushed();
        }
        self.look_at_power_cut();
        self.doing = "opening";
        self.open_anew();
    }

    fn cut_power(&mut self) {
        let after = Arc::new(self.storage.after_power_cut());
        let before = std::mem::replace(&mut self.storage, after);
        before.fail(false);
        let limiter = self.limiter.take();
        before.untimed(|| drop(limiter));
        self.open_anew();
    }

    /// Opens it and finds what a power cut may leave.
    fn open_anew(&mut self) {
        let limiter = self.limiter.take();
        self.storage.untimed(|| drop(limiter));
        self.open();
        let found = self.logs();
        let now = self.clock.now();
        let durable = self.model.durable();
        self.model.assert_allows(&found, durable, now, "reopened");
        self.model.adopt(&found, durable);
        self.model.flushed();
    }

    /// It is well by itself, serves, and the disk has all that was answered.
    fn end(&mut self) {
        self.look_at_power_cut();
        self.recover();
        if self.check(ADA, 1).is_err() {
            self.look_at_power_cut();
            self.recover();
        }
        while self.flush_by(Vault::flush).is_err() {
            self.look_at_power_cut();
            self.recover();
        }
        self.look_at_power_cut();
        self.durable = self.model.durable();
        self.look_at_durable();
    }
}

/// A failed assertion must not leave the last handle waiting for the storage.
impl Drop for Run {
    fn drop(&mut self) {
        if thread::panicking() {
            println!("{:?} at call {}, {}", self.fault, self.seed, self.doing);
        }
        self.storage.fail(false);
        let limiter = self.limiter.take();
        self.storage.untimed(|| drop(limiter));
    }
}
