//! The child: checks by several threads until it is killed, and says every answer before the next
//! check of the same client.

use std::io::{self, BufRead};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use ratevault::{
    Clock, Decision, Durability, Error, FixedWindow, Key, Limiter, Row, SlidingWindow, Vault,
    VaultBuilder,
};

use crate::clock::SteppedClock;
use crate::event::{self, Answer, CLIENTS, CROWD, Command, Event, Held, THREADS, Table, instant};
use crate::{Failure, below};

/// How long to wait before a disk that has failed is asked again.
const BACK_OFF: Duration = Duration::from_millis(10);

/// How long opening may fail.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a child is told to begin with.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) path: PathBuf,
    pub(crate) durability: Durability,
    pub(crate) clock: Arc<SteppedClock>,
}

impl Worker {
    /// Says what is there, then checks until the parent has gone.
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let tables = patiently(|| self.look())?;
        let world = World::new(tables);
        thread::scope(|scope| {
            for thread in 0..THREADS {
                let world = &world;
                scope.spawn(move || world.check_for_ever(thread));
            }
            for line in io::stdin().lock().lines() {
                let obeyed = line
                    .map_err(Failure::from)
                    .and_then(|line| self.obey(&world, serde_json::from_str(&line)?));
                if let Err(error) = obeyed {
                    say(&Event::Wrong(error.to_string()));
                }
            }
            // The parent has gone, and the threads never end.
            std::process::exit(0)
        })
    }

    /// Opens the file and says what is there.
    pub(crate) fn look(&self) -> Result<Tables, Failure> {
        let tables = Tables::open(self)?;
        tables.say_rows()?;
        let now = self.clock.now().as_millis();
        say(&Event::Opened { now });
        Ok(tables)
    }

    fn obey(&self, world: &World, command: Command) -> Result<(), Failure> {
        match command {
            Command::Flush => {
                let tables = world.tables.read().unwrap_or_else(PoisonError::into_inner);
                say(&Event::Begin);
                say(match tables.flush() {
                    Ok(()) => &Event::End,
                    Err(_) => &Event::NotFlushed,
                });
                tables.check_bound()?;
            }
            Command::Step(offset) => {
                // Every answer was given and said either before the step or after it.
                let _all = world.tables.write().unwrap_or_else(PoisonError::into_inner);
                let (peak, now) = self.clock.step(offset);
                say(&Event::Stepped { peak, now, offset });
            }
            Command::Reopen => {
                let mut tables = world.tables.write().unwrap_or_else(PoisonError::into_inner);
                while tables.flush().is_err() {
                    thread::sleep(BACK_OFF);
                }
                match tables.close() {
                    // The disk may refuse, and has everything.
                    Ok(()) | Err(Error::Unavailable { .. }) => {}
                    Err(error) => return Err(error.into()),
                }
                *tables = patiently(|| Ok(Tables::open(self)?))?;
                say(&Event::Reopened);
            }
        }
        Ok(())
    }

    fn builder<V: Row>(&self, table: &str) -> VaultBuilder<V> {
        Vault::builder(table)
            .path(&self.path)
            .durability(self.durability)
            .clock(Arc::clone(&self.clock) as _)
    }
}

/// Tries again for some seconds: the disk may refuse.
fn patiently<T>(mut open: impl FnMut() -> Result<T, Failure>) -> Result<T, Failure> {
    let begun = Instant::now();
    loop {
        match open() {
            Err(_) if begun.elapsed() < PATIENCE => thread::sleep(BACK_OFF),
            done => return done,
        }
    }
}

/// Says an event. Nobody is left to work for if it cannot be said.
fn say(event: &Event) {
    if event::say(io::stdout().lock(), event).is_err() {
        std::process::exit(0);
    }
}

/// The limits, all in one file.
#[derive(Debug)]
pub(crate) struct Tables {
    counted: Limiter<SlidingWindow>,
    ignored: Limiter<SlidingWindow>,
    fixed: Limiter<FixedWindow>,
    hot: Limiter<FixedWindow>,
    crowd: Limiter<SlidingWindow>,
    clock: Arc<SteppedClock>,
}

impl Tables {
    fn open(worker: &Worker) -> ratevault::Result<Self> {
        let fixed = worker.builder("fixed").open()?;
        let crowd = worker.builder("crowd").max_keys(CROWD);
        Ok(Self {
            counted: Limiter::new(worker.builder("counted").open()?, event::counted()?),
            ignored: Limiter::new(worker.builder("ignored").open()?, event::ignored()?),
            hot: Limiter::new(fixed.clone(), event::hot()?),
            fixed: Limiter::new(fixed, event::fixed()?),
            crowd: Limiter::new(crowd.open()?, event::crowd()?),
            clock: Arc::clone(&worker.clock),
        })
    }

    fn say_rows(&self) -> Result<(), Failure> {
        for (table, limiter) in [
            (Table::Counted, &self.counted),
            (Table::Ignored, &self.ignored),
        ] {
            for entry in limiter.vault().scan() {
                let entry = entry?;
                self.say_found(table, number(&entry.key)?, Some(Held::Log(entry.value)));
            }
        }
        for entry in self.fixed.vault().scan() {
            let entry = entry?;
            if entry.key.endpoint() == "hot" {
                say(&Event::HotFound(entry.value.used()));
            } else {
                let held = Held::Count(entry.value);
                self.say_found(Table::Fixed, number(&entry.key)?, Some(held));
            }
        }
        Ok(())
    }

    fn say_found(&self, table: Table, client: u32, held: Option<Held>) {
        let now = self.clock.now().as_millis();
        say(&Event::Found {
            table,
            client,
            held,
            now,
        });
    }

    /// The row of a client, read again.
    fn held(&self, table: Table, client: u32) -> ratevault::Result<Option<Held>> {
        let key = Key::new("check", &client.to_string())?;
        Ok(match table {
            Table::Counted => self.counted.vault().get(&key)?.map(Held::Log),
            Table::Ignored => self.ignored.vault().get(&key)?.map(Held::Log),
            Table::Fixed => self.fixed.vault().get(&key)?.map(Held::Count),
        })
    }

    fn check(&self, table: Table, client: u32) -> ratevault::Result<Decision> {
        let client = &*client.to_string();
        match table {
            Table::Counted => self.counted.check("check", client),
            Table::Ignored => self.ignored.check("check", client),
            Table::Fixed => self.fixed.check("check", client),
        }
    }

    fn flush(&self) -> ratevault::Result<()> {
        self.counted.vault().flush()?;
        self.ignored.vault().flush()?;
        self.fixed.vault().flush()?;
        self.crowd.vault().flush()
    }

    pub(crate) fn close(&self) -> ratevault::Result<()> {
        self.counted.vault().close()
    }

    fn check_bound(&self) -> Result<(), Failure> {
        match self.crowd.vault().len() {
            Ok(rows) if rows > CROWD => Err(format!("{rows} rows, more than {CROWD}").into()),
            Ok(_) | Err(Error::Unavailable { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

fn number(key: &Key) -> Result<u32, Failure> {
    Ok(key.client().to_string().parse()?)
}

/// What the threads share.
struct World {
    /// Read for a check, written to set the clock or to open anew.
    tables: RwLock<Tables>,
    clients: Vec<Client>,
}

/// A client of a table.
struct Client {
    table: Table,
    number: u32,
    /// Held from a check until its answer was said, so that answers are said in order.
    saying: Mutex<()>,
}

impl World {
    fn new(tables: Tables) -> Self {
        let clients = |table| {
            (0..CLIENTS).map(move |number| Client {
                table,
                number,
                saying: Mutex::new(()),
            })
        };
        Self {
            tables: RwLock::new(tables),
            clients: Table::ALL.into_iter().flat_map(clients).collect(),
        }
    }

    /// Some often, some rarely.
    fn any_client(&self) -> Option<&Client> {
        let tables = Table::ALL.len() as u64;
        let number = below(1 + below(CLIENTS.into()));
        let at = below(tables) * u64::from(CLIENTS) + number;
        usize::try_from(at).ok().and_then(|at| self.clients.get(at))
    }

    fn check_for_ever(&self, thread: u32) {
        let mut newcomers = Newcomers::new(thread);
        loop {
            let tables = self.tables.read().unwrap_or_else(PoisonError::into_inner);
            let done = match below(8) {
                0 => newcomers.check(&tables),
                1 => check_hot(&tables),
                _ => {
                    if let Some(client) = self.any_client() {
                        client.check(&tables);
                    }
                    Ok(())
                }
            };
            match done {
                Ok(()) => {}
                Err(Error::Unavailable { .. }) => {
                    say(&Event::Failed);
                    drop(tables);
                    thread::sleep(BACK_OFF);
                }
                Err(error) => say(&Event::Wrong(error.to_string())),
            }
        }
    }
}

impl Client {
    /// One check. If it fails, the disk is waited for, and asked what came of it.
    fn check(&self, tables: &Tables) {
        let _in_order = self.saying.lock().unwrap_or_else(PoisonError::into_inner);
        let (table, client) = (self.table, self.number);
        match tables.check(table, client) {
            Ok(decision) => say(&Event::Answered(Answer {
                table,
                client,
                now: instant(&decision).as_millis(),
                said: decision.into(),
            })),
            Err(Error::Unavailable { .. }) => {
                say(&Event::Failed);
                tables.say_found(table, client, held_when_well(tables, table, client));
            }
            Err(error) => say(&Event::Wrong(error.to_string())),
        }
    }
}

fn held_when_well(tables: &Tables, table: Table, client: u32) -> Option<Held> {
    loop {
        match tables.held(table, client) {
            Ok(held) => return held,
            Err(Error::Unavailable { .. }) => thread::sleep(BACK_OFF),
            Err(error) => {
                say(&Event::Wrong(error.to_string()));
                thread::sleep(BACK_OFF);
            }
        }
    }
}

fn check_hot(tables: &Tables) -> ratevault::Result<()> {
    let decision = tables.hot.check("hot", "all")?;
    say(&Event::HotAnswered(decision.limit() - decision.remaining()));
    Ok(())
}

/// Clients that come once.
struct Newcomers {
    process: u64,
    thread: u32,
    came: u64,
}

impl Newcomers {
    /// How many are said at once.
    const TOGETHER: u64 = 100;

    fn new(thread: u32) -> Self {
        Self {
            process: below(u64::MAX),
            thread,
            came: 0,
        }
    }

    fn check(&mut self, tables: &Tables) -> ratevault::Result<()> {
        let Self {
            process,
            thread,
            came,
        } = *self;
        self.came += 1;
        let client = format!("{process}/{thread}/{came}");
        let decision = tables.crowd.check("check", &client)?;
        if decision.limit() - decision.remaining() != 1 {
            let what = format!("{client} came once and was answered {decision:?}");
            say(&Event::Wrong(what));
        }
        if self.came.is_multiple_of(Self::TOGETHER) {
            say(&Event::Newcomers(Self::TOGETHER));
        }
        Ok(())
    }
}
