//! The options of a limit, which `attempt` and `replay` share.

use std::fmt;
use std::path::PathBuf;

use clap::{Args, CommandFactory, ValueEnum, error::ErrorKind};
use ratevault::{Error, FixedWindow, Quota, Refusals, Row, SlidingWindow, Vault, VaultBuilder};

/// The limit and the table it counts in.
#[derive(Args, Debug)]
pub(crate) struct LimitArgs {
    /// How decisions are made
    #[arg(long, value_enum, default_value_t = Kind::Sliding)]
    algorithm: Kind,

    /// What a refused check leaves behind [default: count; a fixed window always ignores them]
    #[arg(long, value_enum)]
    refusals: Option<RefusalsArg>,

    /// The table in the vault
    #[arg(long, default_value = "rate_limits")]
    table: String,

    /// The vault's file [default: $RATEVAULT_DB, else ratevault.redb]
    #[arg(long, value_name = "PATH")]
    pub(crate) db: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Kind {
    Sliding,
    Fixed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum RefusalsArg {
    Count,
    Ignore,
}

/// What the options ask for.
pub(crate) enum Limit {
    Sliding(SlidingWindow),
    Fixed(FixedWindow),
}

impl LimitArgs {
    /// The algorithm that the options and `quotas` describe, or a usage error of command `C`.
    pub(crate) fn limit<C: CommandFactory>(&self, quotas: &[Quota]) -> Limit {
        let Some((first, rest)) = quotas.split_first() else {
            usage_error::<C>("at least one --quota is needed");
        };
        match self.algorithm {
            Kind::Fixed if !rest.is_empty() => {
                usage_error::<C>("a fixed window has one --quota");
            }
            Kind::Fixed if self.refusals == Some(RefusalsArg::Count) => {
                usage_error::<C>(
                    "a fixed window cannot count refusals: leave out --refusals count",
                );
            }
            Kind::Fixed => Limit::Fixed(FixedWindow::new(*first)),
            Kind::Sliding => {
                let window = SlidingWindow::new(*first)
                    .and_then(|window| rest.iter().try_fold(window, |window, q| window.and(*q)));
                let window = window.unwrap_or_else(|error| usage_error::<C>(error));
                Limit::Sliding(window.refusals(match self.refusals {
                    Some(RefusalsArg::Ignore) => Refusals::Ignore,
                    Some(RefusalsArg::Count) | None => Refusals::Count,
                }))
            }
        }
    }

    /// A vault that is about to be opened on the table, in `--db` if that is given.
    pub(crate) fn vault<V: Row>(&self) -> VaultBuilder<V> {
        let builder = Vault::builder(&self.table);
        match &self.db {
            Some(path) => builder.path(path),
            None => builder,
        }
    }
}

/// What was opened or done; what was asked for in vain is a usage error of command `C`.
pub(crate) fn usable<C: CommandFactory, T>(done: Result<T, Error>) -> Result<T, Error> {
    match done {
        Err(error @ (Error::InvalidSetting { .. } | Error::EndpointTooLong { .. })) => {
            usage_error::<C>(error)
        }
        done => done,
    }
}

/// Says what is wrong with the command line and ends the program with 2.
pub(crate) fn usage_error<C: CommandFactory>(message: impl fmt::Display) -> ! {
    C::command()
        .error(ErrorKind::ValueValidation, message)
        .exit()
}
