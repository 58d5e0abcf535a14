//! One check against a vault, for a person or a shell script.
//!
//! ```text
//! attempt login 203.0.113.7 && echo served
//! ```

mod cli;
#[path = "cli/limit.rs"]
mod limit;

use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use limit::{Limit, LimitArgs};
use ratevault::{Algorithm, Decision, Key, Limiter, Quota};
use serde::Serialize;

/// Count one attempt, and say whether it is allowed.
///
/// Ends with 0 if it is allowed, 1 if it is refused, 2 on a usage error, 3 on any other error.
#[derive(Parser, Debug)]
#[command(name = "attempt")]
struct Attempt {
    /// The limit, such as 5/minute; repeat it for several on one count
    #[arg(long = "quota", value_name = "QUOTA", default_value = "5/minute")]
    quotas: Vec<Quota>,

    #[command(flatten)]
    limit: LimitArgs,

    /// How many places the attempt takes
    #[arg(long, default_value_t = 1, conflicts_with_all = ["peek", "reset"])]
    cost: u32,

    /// Say what is left, and count nothing
    #[arg(long, conflicts_with = "reset")]
    peek: bool,

    /// Forget the client
    #[arg(long)]
    reset: bool,

    /// Print one JSON object
    #[arg(long)]
    json: bool,

    /// What is attempted, such as login
    endpoint: String,

    /// Who attempts it, such as an address or an account
    client: String,
}

fn main() -> ExitCode {
    cli::quiet_storage();
    let attempt = Attempt::parse();
    let done = match attempt.limit.limit::<Attempt>(&attempt.quotas) {
        Limit::Sliding(window) => attempt.run(window),
        Limit::Fixed(window) => attempt.run(window),
    };
    done.unwrap_or_else(|error| cli::failure("attempt", error))
}

impl Attempt {
    /// Does what was asked, prints the answer, and says how the program is to end.
    fn run<A: Algorithm>(&self, algorithm: A) -> Result<ExitCode, Box<dyn Error>> {
        if let Err(error) = algorithm.check_cost(self.cost) {
            limit::usage_error::<Self>(error);
        }
        limit::usable::<Self, _>(Key::new(&self.endpoint, &self.client))?;
        let vault = limit::usable::<Self, _>(self.limit.vault().open())?;
        let limiter = Limiter::new(vault, algorithm);
        let (code, line) = self.act(&limiter)?;
        limiter.vault().close()?;
        cli::still_read(writeln!(io::stdout().lock(), "{line}"))?;
        Ok(code)
    }

    fn act<A: Algorithm>(
        &self,
        limiter: &Limiter<A>,
    ) -> Result<(ExitCode, String), Box<dyn Error>> {
        if self.reset {
            limiter.reset(&self.endpoint, &self.client)?;
            return Ok((ExitCode::SUCCESS, self.forgotten()?));
        }
        if self.peek {
            let decision = limiter.peek(&self.endpoint, &self.client)?;
            return Ok((ExitCode::SUCCESS, self.peeked(&decision)?));
        }
        let decision = limiter.check_n(&self.endpoint, &self.client, self.cost)?;
        let code = u8::from(!decision.is_allowed());
        Ok((ExitCode::from(code), self.checked(&decision)?))
    }

    fn checked(&self, decision: &Decision) -> serde_json::Result<String> {
        if self.json {
            return serde_json::to_string(&Checked {
                endpoint: &self.endpoint,
                client: &self.client,
                allowed: decision.is_allowed(),
                limit: decision.limit(),
                remaining: decision.remaining(),
                reset_at_ms: decision.reset_at().as_millis(),
                retry_after: decision.retry_after(),
            });
        }
        Ok(match decision.retry_after() {
            Some(seconds) => format!("refused: try again in {seconds} s"),
            None => format!("allowed: {}", left(decision)),
        })
    }

    fn peeked(&self, decision: &Decision) -> serde_json::Result<String> {
        if self.json {
            return serde_json::to_string(&Peeked {
                endpoint: &self.endpoint,
                client: &self.client,
                limit: decision.limit(),
                remaining: decision.remaining(),
                reset_at_ms: decision.reset_at().as_millis(),
            });
        }
        Ok(left(decision))
    }

    fn forgotten(&self) -> serde_json::Result<String> {
        if self.json {
            return serde_json::to_string(&Forgotten {
                endpoint: &self.endpoint,
                client: &self.client,
                reset: true,
            });
        }
        Ok("forgotten".into())
    }
}

fn left(decision: &Decision) -> String {
    let seconds = decision.reset_after().as_millis().div_ceil(1_000);
    let (remaining, limit) = (decision.remaining(), decision.limit());
    format!("{remaining} of {limit} left, resets in {seconds} s")
}

#[derive(Serialize)]
struct Checked<'a> {
    endpoint: &'a str,
    client: &'a str,
    allowed: bool,
    limit: u32,
    remaining: u32,
    reset_at_ms: u64,
    retry_after: Option<u64>,
}

#[derive(Serialize)]
struct Peeked<'a> {
    endpoint: &'a str,
    client: &'a str,
    limit: u32,
    remaining: u32,
    reset_at_ms: u64,
}

#[derive(Serialize)]
struct Forgotten<'a> {
    endpoint: &'a str,
    client: &'a str,
    reset: bool,
}
