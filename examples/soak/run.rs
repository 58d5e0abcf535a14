//! The parent of one durability: starts children one after the other, has things happen to them, and
//! compares what they say with the model.

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::event::{self, Command, Event};
use crate::report::{Sizes, Tally};
use crate::{Failure, Kind, below, faults};

mod listener;

use self::listener::Listener;

/// How far ahead of the system's clock a child's may be, and behind, in ms.
const AHEAD: u64 = 30_000;

/// A child is killed after 1, 2, 4, .. events, at most so many times doubled.
const LONGEST_LIFE: u64 = 9;

/// How long a child may take to obey before the next command comes.
const PATIENCE: Duration = Duration::from_secs(5);

/// How many reports of what went wrong are printed.
const SHOWN: u64 = 20;

/// A file, and what happens to it.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) kind: Kind,
    path: PathBuf,
    end: Instant,
    verbose: bool,
    tally: Mutex<Tally>,
    sizes: Mutex<Sizes>,
    /// A fault was injected into the child that runs, so that calls may fail.
    is_faulty: AtomicBool,
    /// The last fault was noticed by nobody yet.
    is_unnoticed: AtomicBool,
    /// How many commands the child that runs has obeyed.
    obeyed: AtomicU64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Run {
    pub(crate) fn new(folder: &Path, kind: Kind, end: Instant, verbose: bool) -> Self {
        Self {
            kind,
            path: folder.join(format!("{}.redb", kind.name())),
            end,
            verbose,
            tally: Mutex::default(),
            sizes: Mutex::default(),
            is_faulty: AtomicBool::new(false),
            is_unnoticed: AtomicBool::new(false),
            obeyed: AtomicU64::new(0),
        }
    }

    pub(crate) fn tally(&self) -> Tally {
        *lock(&self.tally)
    }

    /// The sizes since they were last taken.
    pub(crate) fn take_sizes(&self) -> Sizes {
        std::mem::take(&mut *lock(&self.sizes))
    }

    /// One child after the other, until it is time; then a last look.
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let mut listener = Listener::new(self)?;
        let mut offset = 0;
        while Instant::now() < self.end {
            let mut offsets = vec![offset];
            let (mut child, mut commands, lines) = self.spawn(offset, false)?;
            let life = thread::scope(|scope| {
                let listening = scope.spawn(|| listener.hear(lines, offset));
                let life = self.live(&mut child, &mut commands, &mut offsets);
                let ended = child.try_wait();
                // It may have ended by itself.
                let _ = child.kill();
                let _ = child.wait();
                if let Ok(Some(status)) = ended {
                    self.wrong(&format!("a child ended by itself: {status}"));
                }
                let heard = listening.join();
                heard.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
                life
            });
            life?;
            lock(&self.tally).kills += 1;
            listener.killed(offsets.get(1..).unwrap_or_default());
            offset = offsets.pop().unwrap_or(offset);
        }
        let (mut child, commands, lines) = self.spawn(offset, true)?;
        listener.hear(lines, offset)?;
        drop(commands);
        if !child.wait()?.success() {
            self.wrong("the last look failed");
        }
        Ok(())
    }

    fn spawn(
        &self,
        offset: i64,
        look: bool,
    ) -> Result<(Child, ChildStdin, BufReader<ChildStdout>), Failure> {
        let mut command = faults::command(&std::env::current_exe()?);
        command.arg("--child").arg(&self.path);
        command.args(["--durability", self.kind.name()]);
        command.args(["--offset", &offset.to_string()]);
        command.args(look.then_some("--look"));
        command.args(self.verbose.then_some("--verbose"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let commands = child.stdin.take().ok_or("no standard input")?;
        let lines = child.stdout.take().ok_or("no standard output")?;
        self.is_faulty.store(false, Ordering::SeqCst);
        self.obeyed.store(0, Ordering::SeqCst);
        Ok((child, commands, BufReader::new(lines)))
    }

    /// Has one thing after the other happen to a child.
    fn live(
        &self,
        child: &mut Child,
        commands: &mut ChildStdin,
        offsets: &mut Vec<i64>,
    ) -> Result<(), Failure> {
        let mut orders = Orders { commands, told: 0 };
        for _ in 0..1_u64 << below(LONGEST_LIFE) {
            self.until_obeyed(orders.told);
            if Instant::now() >= self.end {
                break;
            }
            match below(10) {
                0..4 => orders.tell(Command::Flush),
                4 | 5 => {
                    let offset = i64::try_from(below(2 * AHEAD))? - i64::try_from(AHEAD)?;
                    offsets.push(offset);
                    orders.tell(Command::Step(offset));
                }
                6 | 7 => orders.tell(Command::Reopen),
                8 => {
                    self.is_faulty.store(true, Ordering::SeqCst);
                    self.is_unnoticed.store(true, Ordering::SeqCst);
                    faults::refuse(child, true)?;
                    orders.tell(Command::Flush);
                    self.pause(child);
                    // Some are killed while it lasts.
                    if below(4) == 0 {
                        break;
                    }
                    faults::refuse(child, false)?;
                }
                _ => {}
            }
            self.pause(child);
        }
        Ok(())
    }

    /// Waits until a child has done as it was told, if it ever does: the disk may be busy.
    fn until_obeyed(&self, told: u64) {
        let begun = Instant::now();
        while self.obeyed.load(Ordering::SeqCst) < told
            && begun.elapsed() < PATIENCE
            && Instant::now() < self.end
        {
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Lets a moment pass, and looks how large everything is.
    fn pause(&self, child: &Child) {
        thread::sleep(Duration::from_millis(below(400)));
        let file = fs::metadata(&self.path).map_or(0, |metadata| metadata.len());
        let memory = resident(child).unwrap_or(0);
        let mut sizes = lock(&self.sizes);
        *sizes = sizes.most(Sizes { file, memory });
    }

    /// Takes note of something that must not be.
    fn wrong(&self, what: &str) {
        lock(&self.tally).wrong += 1;
        self.show("wrong", what);
    }

    fn lost(&self, what: &str) {
        lock(&self.tally).lost += 1;
        self.show("lost", what);
    }

    fn show(&self, kind: &str, what: &str) {
        let tally = self.tally();
        if tally.lost + tally.wrong <= SHOWN {
            let _ = writeln!(io::stderr().lock(), "{}: {kind}: {what}", self.kind.name());
        }
    }

    fn obeyed(&self) {
        self.obeyed.fetch_add(1, Ordering::SeqCst);
    }

    /// A call failed.
    fn failed(&self) {
        if self.is_unnoticed.swap(false, Ordering::SeqCst) {
            lock(&self.tally).faults += 1;
        }
        if !self.is_faulty.load(Ordering::SeqCst) {
            self.wrong("a call failed, although no fault was injected");
        }
    }
}

/// What a child was told.
struct Orders<'c> {
    commands: &'c mut ChildStdin,
    told: u64,
}

impl Orders<'_> {
    fn tell(&mut self, command: Command) {
        // It may have ended by itself, which is found out.
        let _ = event::say(&mut *self.commands, &command);
        self.told += 1;
    }
}

/// How many bytes of memory a process holds, where that can be told.
fn resident(child: &Child) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kilobytes: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kilobytes * 1_024)
}

/// The next whole line; one that was cut off by the kill is none.
fn next(lines: &mut impl BufRead) -> io::Result<Option<Event>> {
    let mut line = String::new();
    lines.read_line(&mut line)?;
    match line.strip_suffix('\n') {
        Some(line) => Ok(Some(serde_json::from_str(line)?)),
        None => Ok(None),
    }
}
