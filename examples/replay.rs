//! "What would this limit have done?": runs recorded attempts through a real vault, on a clock that
//! follows them.
//!
//! ```text
//! $ echo '{"at":0}' | replay --quota 5/minute
//! {"at":0,"endpoint":"login","client":"203.0.113.7","allowed":true,"limit":5,...}
//! ```

mod cli;
#[path = "cli/limit.rs"]
mod limit;

use std::collections::HashSet;
use std::error::Error;
use std::fmt;
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use limit::{Limit, LimitArgs};
use ratevault::{Algorithm, Decision, Key, Limiter, ManualClock, Quota, Timestamp};
use serde::{Deserialize, Deserializer, Serialize};

/// Read attempts as JSON lines and say what the limit would have done with each.
///
/// A line is {"op":"check"|"peek"|"reset"|"reopen","at":MS,"endpoint":E,"client":C,"cost":N}; all but
/// "at" may be left out. "at" may go back. "reopen" closes the vault and opens it again. Without --db
/// a temporary file is used. Ends with 2 on a usage error and 3 on any other, a bad line included.
#[derive(Parser, Debug)]
#[command(name = "replay")]
struct Replay {
    /// The limit, such as 5/minute; repeat it for several on one count
    #[arg(long = "quota", value_name = "QUOTA", required = true)]
    quotas: Vec<Quota>,

    #[command(flatten)]
    limit: LimitArgs,
}

fn main() -> ExitCode {
    cli::quiet_storage();
    let replay = Replay::parse();
    let limit = replay.limit.limit::<Replay>(&replay.quotas);
    let done = with_file(replay.limit, |options| match limit {
        Limit::Sliding(window) => Run::new(options, window)?.run(),
        Limit::Fixed(window) => Run::new(options, window)?.run(),
    });
    match done {
        Ok(summary) => {
            let _ = writeln!(io::stderr().lock(), "{summary}");
            ExitCode::SUCCESS
        }
        Err(error) => cli::failure("replay", error),
    }
}

/// Calls `run` with options that name a file: a temporary one if none is named.
fn with_file<T>(
    mut options: LimitArgs,
    run: impl FnOnce(LimitArgs) -> Result<T, Box<dyn Error>>,
) -> Result<T, Box<dyn Error>> {
    if options.db.is_some() {
        return run(options);
    }
    let directory = tempfile::tempdir()
        .map_err(|error| format!("cannot make a temporary file: {error}; name one with --db"))?;
    options.db = Some(directory.path().join("replay.redb"));
    run(options)
}

/// One line of input.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Step {
    #[serde(default)]
    op: Op,
    at: u64,
    #[serde(default = "default_endpoint")]
    endpoint: String,
    #[serde(default = "default_client")]
    client: String,
    #[serde(default = "default_cost", deserialize_with = "cost")]
    cost: u64,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
enum Op {
    #[default]
    Check,
    Peek,
    Reset,
    Reopen,
}

fn default_endpoint() -> String {
    "login".into()
}

fn default_client() -> String {
    "203.0.113.7".into()
}

const fn default_cost() -> u64 {
    1
}

/// One line of output.
#[derive(Serialize)]
#[serde(untagged)]
enum Line<'a> {
    Decided {
        at: u64,
        endpoint: &'a str,
        client: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        allowed: Option<bool>,
        limit: u32,
        remaining: u32,
        reset_ms: u128,
        /// `None`: a peek, which has none.
        #[serde(skip_serializing_if = "Option::is_none")]
        retry_after: Option<Option<u64>>,
    },
    Done {
        op: Op,
    },
    Impossible {
        error: String,
    },
}

/// What the run comes to.
#[derive(Debug, Default)]
struct Summary {
    checks: u64,
    allowed: u64,
    keys: HashSet<Key>,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (checks, allowed) = (self.checks, self.allowed);
        let (refused, keys) = (checks - allowed, self.keys.len());
        write!(
            f,
            "checks {checks}, allowed {allowed}, refused {refused}, keys {keys}"
        )
    }
}

/// A limiter that is run through the input.
struct Run<A: Algorithm> {
    options: LimitArgs,
    algorithm: A,
    clock: Arc<ManualClock>,
    limiter: Limiter<A>,
    summary: Summary,
}

impl<A: Algorithm + Clone> Run<A> {
    fn new(options: LimitArgs, algorithm: A) -> Result<Self, Box<dyn Error>> {
        let clock = Arc::new(ManualClock::default());
        Ok(Self {
            limiter: open(&options, &algorithm, &clock)?,
            options,
            algorithm,
            clock,
            summary: Summary::default(),
        })
    }

    /// Reads standard input to its end, and writes one line per step.
    fn run(mut self) -> Result<Summary, Box<dyn Error>> {
        let mut input = BufReader::new(io::stdin().lock());
        let mut output = BufWriter::new(io::stdout().lock());
        let (mut number, mut text) = (0_u64, Vec::new());
        loop {
            let pauses = !input.buffer().contains(&b'\n');
            if pauses && !cli::still_read(output.flush())? {
                break;
            }
            text.clear();
            number += 1;
            let read = input.read_until(b'\n', &mut text);
            if read.map_err(|error| format!("cannot read standard input: {error}"))? == 0 {
                break;
            }
            let Some(step) = parse(&text).map_err(|error| format!("line {number}: {error}"))?
            else {
                continue;
            };
            let line = self.take(&step).map_err(|error| match error {
                ratevault::Error::EndpointTooLong { .. } => {
                    format!("line {number}: {error}").into()
                }
                error => Box::<dyn Error>::from(error),
            })?;
            let line = serde_json::to_string(&line)?;
            if !cli::still_read(writeln!(output, "{line}"))? {
                break;
            }
        }
        self.limiter.vault().close()?;
        Ok(self.summary)
    }

    fn take<'a>(&mut self, step: &'a Step) -> Result<Line<'a>, ratevault::Error> {
        self.clock.set(Timestamp::from_millis(step.at));
        let (endpoint, client) = (&*step.endpoint, &*step.client);
        match step.op {
            Op::Check => return self.check(step),
            Op::Peek => {
                let decision = self.limiter.peek(endpoint, client)?;
                return Ok(step.decided(&decision, true));
            }
            Op::Reset => self.limiter.reset(endpoint, client)?,
            Op::Reopen => {
                self.limiter.vault().close()?;
                self.limiter = open(&self.options, &self.algorithm, &self.clock)?;
            }
        }
        Ok(Line::Done { op: step.op })
    }

    fn check<'a>(&mut self, step: &'a Step) -> Result<Line<'a>, ratevault::Error> {
        let Ok(cost) = u32::try_from(step.cost) else {
            let error = format!("a check of cost {} can never fit", step.cost);
            return Ok(Line::Impossible { error });
        };
        let (endpoint, client) = (&*step.endpoint, &*step.client);
        let decision = match self.limiter.check_n(endpoint, client, cost) {
            Ok(decision) => decision,
            Err(error @ ratevault::Error::InvalidCost { .. }) => {
                let error = error.to_string();
                return Ok(Line::Impossible { error });
            }
            Err(error) => return Err(error),
        };
        self.summary.checks += 1;
        self.summary.allowed += u64::from(decision.is_allowed());
        self.summary.keys.insert(Key::new(endpoint, client)?);
        Ok(step.decided(&decision, false))
    }
}

/// The vault is on the run's clock, and rows leave it for that clock's sake alone: a sweep on the
/// side would make what comes after a step back depend on chance.
fn open<A: Algorithm + Clone>(
    options: &LimitArgs,
    algorithm: &A,
    clock: &Arc<ManualClock>,
) -> Result<Limiter<A>, ratevault::Error> {
    let vault = options.vault().clock(clock.clone()).background_sweep(false);
    let vault = limit::usable::<Replay, _>(vault.open())?;
    Ok(Limiter::new(vault, algorithm.clone()))
}

/// The step that a line holds; none if it is blank.
fn parse(line: &[u8]) -> Result<Option<Step>, String> {
    match line.trim_ascii() {
        [] => Ok(None),
        // serde would take the fields of an array in order.
        [b'[', ..] => Err("a step is an object".into()),
        line => serde_json::from_slice(line).map(Some).map_err(|error| {
            let position = format!(" at line {} column {}", error.line(), error.column());
            error.to_string().replace(&position, "")
        }),
    }
}

/// A cost; one that no integer holds can never fit either.
fn cost<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let number = serde_json::Number::deserialize(deserializer)?;
    let beyond = |cost: f64| cost >= u64::MAX as f64;
    match number.as_u64() {
        Some(cost) => Ok(cost),
        None if number.as_f64().is_some_and(beyond) => Ok(u64::MAX),
        None => Err(serde::de::Error::custom(format!("{number} is no cost"))),
    }
}

impl Step {
    fn decided(&self, decision: &Decision, is_peek: bool) -> Line<'_> {
        Line::Decided {
            at: self.at,
            endpoint: &self.endpoint,
            client: &self.client,
            allowed: (!is_peek).then_some(decision.is_allowed()),
            limit: decision.limit(),
            remaining: decision.remaining(),
            reset_ms: decision.reset_after().as_millis(),
            retry_after: (!is_peek).then_some(decision.retry_after()),
        }
    }
}
