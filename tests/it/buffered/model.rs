//! Whatever happens in whatever order, a buffered table is a plain map.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use ratevault::{Applied, Clock, Error, ManualClock, Slot, Timestamp, Vault, VaultBuilder};

use super::{RARELY, buffered};
use crate::support::faulty::Faulty;
use crate::support::file::Contents;
use crate::support::{Number, SECOND, eventually, key, manual_clock, single_threaded};

#[derive(Clone, Debug)]
enum Step {
    Add {
        client: u8,
        ttl: u64,
        is_async: bool,
    },
    Put {
        client: u8,
        ttl: u64,
    },
    Remove {
        client: u8,
    },
    /// A closure that takes the value and leaves nothing.
    Take {
        client: u8,
    },
    Panic {
        client: u8,
        is_async: bool,
    },
    Get {
        client: u8,
    },
    Scan,
    RemoveAll,
    Flush,
    Sweep,
    Advance {
        ms: u64,
    },
    SetBack {
        ms: u64,
    },
    Reopen,
    PowerCut,
    /// The disk fails, or is well again.
    Break,
    Mend,
}

/// More clients than a memory that is split into few parts holds.
const CLIENTS: u8 = 48;

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let client = 0..CLIENTS;
    let ttl = prop_oneof![
        1 => Just(0_u64),
        2 => Just(1_000),
        2 => Just(30_000),
        6 => Just(60_000),
        1 => 100_000_u64..100_100,
    ];
    let add = (client.clone(), ttl.clone(), any::<bool>());
    let panicking = (client.clone(), any::<bool>());
    let step = prop_oneof![
        16 => add.prop_map(|(client, ttl, is_async)| Step::Add { client, ttl, is_async }),
        5 => (client.clone(), ttl).prop_map(|(client, ttl)| Step::Put { client, ttl }),
        4 => client.clone().prop_map(|client| Step::Remove { client }),
        2 => client.clone().prop_map(|client| Step::Take { client }),
        2 => panicking.prop_map(|(client, is_async)| Step::Panic { client, is_async }),
        8 => client.prop_map(|client| Step::Get { client }),
        1 => Just(Step::Scan),
        1 => Just(Step::RemoveAll),
        3 => Just(Step::Flush),
        2 => Just(Step::Sweep),
        4 => (1_u64..20_000).prop_map(|ms| Step::Advance { ms }),
        1 => (1_u64..100_000).prop_map(|ms| Step::SetBack { ms }),
        1 => Just(Step::Reopen),
        2 => Just(Step::PowerCut),
        2 => Just(Step::Break),
        3 => Just(Step::Mend),
    ];
    prop::collection::vec(step, 1..150)
}

/// What the map holds for a client.
#[derive(Clone, Copy, Debug)]
struct Held {
    number: u64,
    ttl: u64,
    /// From when on it may be gone: a sweep dates back what a clock that ran ahead has written.
    earliest: u64,
    expires_at: u64,
    /// It was gone for a while: whether it comes back with a clock that is set back is not promised.
    was_gone: bool,
}

impl Held {
    /// Whether it is to be seen; `None`: that is not promised.
    fn is_live(&self, now: u64) -> Option<bool> {
        match () {
            () if now >= self.expires_at => Some(false),
            () if self.was_gone || now >= self.earliest => None,
            () => Some(true),
        }
    }

    /// Whether a look may find this.
    fn may_be(&self, found: Option<u64>, now: u64) -> bool {
        match found {
            None => self.is_live(now) != Some(true),
            Some(found) => self.is_live(now) != Some(false) && found == self.number,
        }
    }
}

type Map = BTreeMap<u8, Held>;

struct Model {
    storage: Arc<Faulty>,
    clock: Arc<ManualClock>,
    buffer_bytes: usize,
    vault: Vault<Number>,
    map: Map,
    /// What each client had, from the last completed flush on.
    since_flush: Vec<Map>,
    is_broken: bool,
}

impl Model {
    fn new(buffer_bytes: usize) -> Self {
        let (storage, clock) = (Arc::new(Faulty::default()), manual_clock());
        let vault = builder(&storage, &clock, buffer_bytes).open().unwrap();
        Self {
            storage,
            clock,
            buffer_bytes,
            vault,
            map: Map::new(),
            since_flush: vec![Map::new()],
            is_broken: false,
        }
    }

    fn now(&self) -> u64 {
        self.clock.now().as_millis()
    }

    /// Whether a look at `client` may find this.
    fn may_be(&self, client: u8, found: Option<u64>) -> bool {
        let held = self.map.get(&client);
        held.map_or(found.is_none(), |held| held.may_be(found, self.now()))
    }

    /// Whether the call was answered; it may fail only with the disk, and then changes nothing.
    #[track_caller]
    fn answered<T>(&self, result: Result<T, Error>) -> Option<T> {
        match result {
            Ok(answer) => Some(answer),
            Err(Error::Unavailable {
                applied, source, ..
            }) => {
                assert!(self.is_broken, "{source}");
                assert_eq!(applied, Applied::No);
                None
            }
            Err(error) => panic!("{error:?}"),
        }
    }

    fn hold(&mut self, client: u8, number: u64, ttl: u64) {
        let expires_at = self.now() + ttl;
        let held = Held {
            number,
            ttl,
            earliest: expires_at,
            expires_at,
            was_gone: ttl == 0,
        };
        self.map.insert(client, held);
        self.note();
    }

    fn note(&mut self) {
        self.since_flush.push(self.map.clone());
    }

    /// What was in memory is on disk.
    fn flushed(&mut self) {
        self.since_flush = vec![self.map.clone()];
    }

    /// Runs `f` on all that is known of rows.
    fn each(&mut self, f: impl Fn(&mut Held)) {
        let maps = self.since_flush.iter_mut().chain([&mut self.map]);
        maps.flat_map(|map| map.values_mut()).for_each(f);
    }

    fn moved(&mut self) {
        let now = self.now();
        self.each(|held| held.was_gone |= now >= held.earliest);
    }

    fn add(&mut self, client: u8, ttl: u64, is_async: bool) {
        let add = move |slot: &mut Slot<Number>| {
            let found = slot.take().map(|Number(number)| number);
            let next = found.unwrap_or(0) + 1;
            slot.put(Number(next), Duration::from_millis(ttl));
            found
        };
        let key = key(&client.to_string());
        let result = if is_async {
            single_threaded().block_on(self.vault.update_async(&key, add))
        } else {
            self.vault.update(&key, add)
        };
        if let Some(found) = self.answered(result) {
            assert!(self.may_be(client, found), "{client}: {found:?}");
            self.hold(client, found.unwrap_or(0) + 1, ttl);
        }
    }

    fn take(&mut self, client: u8) {
        let take = |slot: &mut Slot<Number>| slot.take().map(|Number(number)| number);
        let result = self.vault.update(&key(&client.to_string()), take);
        if let Some(found) = self.answered(result) {
            assert!(self.may_be(client, found), "{client}: {found:?}");
        }
    }

    fn panic(&mut self, client: u8, is_async: bool) {
        let panicking = |slot: &mut Slot<Number>| {
            slot.take();
            slot.put(Number(1_000), SECOND);
            // Not by `panic!`, which would be said each time.
            std::panic::resume_unwind(Box::new("mine"));
        };
        let key = key(&client.to_string());
        let run = || match is_async {
            true => single_threaded().block_on(self.vault.update_async(&key, panicking)),
            false => self.vault.update::<(), _>(&key, panicking),
        };
        // It is the caller's panic, or an error of the disk; what it left is nowhere to be found.
        if let Ok(result) = catch_unwind(AssertUnwindSafe(run)) {
            assert!(self.answered(result).is_none());
        }
        self.get(client);
    }

    fn put(&mut self, client: u8, ttl: u64) {
        let span = Duration::from_millis(ttl);
        let result = self.vault.put(&key(&client.to_string()), Number(70), span);
        if self.answered(result).is_some() {
            self.hold(client, 70, ttl);
        }
    }

    fn remove(&mut self, client: u8) {
        let result = self.vault.remove(&key(&client.to_string()));
        if let Some(was_there) = self.answered(result) {
            let held = self.map.get(&client);
            let expected = held.map_or(Some(false), |held| held.is_live(self.now()));
            assert!(expected.is_none_or(|expected| expected == was_there));
            self.map.remove(&client);
            self.note();
        }
    }

    fn get(&self, client: u8) {
        let found = self.answered(self.vault.get(&key(&client.to_string())));
        if let Some(found) = found {
            let found = found.map(|Number(number)| number);
            assert!(
                self.may_be(client, found),
                "{client}: {found:?} {:?}",
                self.map.get(&client)
            );
        }
    }

    fn scan(&mut self) {
        let rows: Result<Vec<_>, Error> = self.vault.scan().collect();
        let Some(rows) = self.answered_or_unknown(rows) else {
            return;
        };
        self.flushed();
        let client = |key: &ratevault::Key| key.client().to_string().parse::<u8>().unwrap();
        let rows = rows.iter().map(|row| (client(&row.key), row.value.0));
        let rows: BTreeMap<u8, u64> = rows.collect();
        for client in 0..CLIENTS {
            let found = rows.get(&client).copied();
            assert!(self.may_be(client, found), "{client}: {found:?}");
        }
    }

    /// As `answered`, of a call that may have to commit, which nobody knows the end of.
    #[track_caller]
    fn answered_or_unknown<T>(&self, result: Result<T, Error>) -> Option<T> {
        match result {
            Err(Error::Unavailable { .. }) if self.is_broken => None,
            result => self.answered(result),
        }
    }

    fn remove_all(&mut self) {
        let result = self.vault.remove_endpoint("test");
        if self.answered_or_unknown(result).is_some() {
            self.map.clear();
            self.flushed();
        }
    }

    fn flush(&mut self) {
        let result = self.vault.flush();
        if self.answered_or_unknown(result).is_some() {
            self.flushed();
        }
    }

    fn sweep(&mut self) {
        let result = self.vault.sweep();
        let now = self.now();
        // It may have got as far as that before the disk failed.
        self.each(|held| held.earliest = held.earliest.min(now + held.ttl));
        if self.answered_or_unknown(result).is_some() {
            self.flushed();
        }
    }

    fn set_back(&mut self, ms: u64) {
        self.clock.set(Timestamp::from_millis(self.now() - ms));
    }

    fn advance(&mut self, ms: u64) {
        self.clock.advance(Duration::from_millis(ms));
        self.moved();
    }

    fn reopen(&mut self) {
        self.mend();
        self.vault.close().unwrap();
        self.flushed();
        let builder = builder(&self.storage, &self.clock, self.buffer_bytes);
        self.vault = builder.open().unwrap();
    }

    fn break_disk(&mut self) {
        self.storage.fail(true);
        self.is_broken = true;
    }

    fn mend(&mut self) {
        if self.is_broken {
            self.storage.fail(false);
            // A call may find the disk as it was until the file is open again.
            eventually("it is well", || self.vault.flush().is_ok());
            self.is_broken = false;
            self.flushed();
        }
    }

    /// Each client has what it had at the last completed flush, or later.
    fn power_cut(&self) {
        let image = Arc::new(Faulty::with_image(self.storage.durable_image()));
        let vault = Vault::<Number>::builder("numbers").storage(image);
        let vault = vault
            .clock(Arc::clone(&self.clock) as _)
            .background_sweep(false);
        let vault = vault.open().unwrap();
        let now = self.now();
        for client in 0..CLIENTS {
            let found = vault.get(&key(&client.to_string())).unwrap();
            let found = found.map(|Number(number)| number);
            let had = |map: &Map| {
                let held = map.get(&client);
                held.map_or(found.is_none(), |held| held.may_be(found, now))
            };
            assert!(self.since_flush.iter().any(had), "{client}: {found:?}");
        }
    }

    /// The file, read with redb alone, holds what the map holds and files it once.
    fn finish(mut self) {
        self.mend();
        self.vault.close().unwrap();
        self.flushed();
        self.power_cut();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), self.storage.durable_image()).unwrap();
        let contents = Contents::read(file.path(), "numbers");
        contents.check_invariant();
        for (client, held) in &self.map {
            if held.is_live(self.now()) == Some(true) {
                let name = client.to_string();
                let end = [&[0, name.len() as u8], name.as_bytes()].concat();
                let is_there = contents.rows.keys().any(|key| key.ends_with(&end));
                assert!(is_there, "{client}");
            }
        }
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Add {
                client,
                ttl,
                is_async,
            } => self.add(client, ttl, is_async),
            Step::Put { client, ttl } => self.put(client, ttl),
            Step::Remove { client } => self.remove(client),
            Step::Take { client } => self.take(client),
            Step::Panic { client, is_async } => self.panic(client, is_async),
            Step::Get { client } => self.get(client),
            Step::Scan => self.scan(),
            Step::RemoveAll => self.remove_all(),
            Step::Flush => self.flush(),
            Step::Sweep => self.sweep(),
            Step::Advance { ms } => self.advance(ms),
            Step::SetBack { ms } => self.set_back(ms),
            Step::Reopen => self.reopen(),
            Step::PowerCut => self.power_cut(),
            Step::Break => self.break_disk(),
            Step::Mend => self.mend(),
        }
    }
}

fn builder(
    storage: &Arc<Faulty>,
    clock: &Arc<ManualClock>,
    buffer_bytes: usize,
) -> VaultBuilder<Number> {
    let builder = buffered(storage).durability(RARELY).cache_bytes(0);
    let builder = builder.clock(Arc::clone(clock) as _);
    builder.background_sweep(false).buffer_bytes(buffer_bytes)
}

/// Nothing fits, so that each newcomer has to wait for a flush; some; everything.
fn buffer_bytes() -> impl Strategy<Value = usize> {
    prop_oneof![Just(0), Just(1), (200_usize..20_000), Just(1 << 20),]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_buffered_table_is_a_plain_map(buffer_bytes in buffer_bytes(), steps in steps()) {
        let mut model = Model::new(buffer_bytes);
        for step in &steps {
            model.step(step);
        }
        model.finish();
    }
}
