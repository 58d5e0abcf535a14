//! What a vault holds: for people a table, for programs one JSON object a line.
//!
//! ```text
//! dump --live --sort hits --top 20
//! dump --json | jq 'select(.hits > 3)'
//! ```

mod cli;
#[path = "cli/line.rs"]
mod line;
#[path = "cli/paper.rs"]
mod paper;

use std::error::Error;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, ValueEnum};
use jiff::Timestamp;
use line::Line;
use paper::{Paper, Totals};
use ratevault::{Client, Clock, Key, Snapshot, SystemClock, TableInfo};

/// Show the rows of a vault, also while its program runs.
///
/// Ends with 0, with 2 on a usage error, and with 3 on any other or if a row is damaged.
#[derive(Parser, Debug)]
#[command(name = "dump")]
struct Dump {
    /// The vault's file [default: $RATEVAULT_DB, else ratevault.redb]
    #[arg(long, value_name = "PATH")]
    db: Option<PathBuf>,

    /// Only this table
    #[arg(long)]
    table: Option<String>,

    /// Only rows of this endpoint
    #[arg(long)]
    endpoint: Option<String>,

    /// Hide rows that have expired
    #[arg(long)]
    live: bool,

    /// Most hits first, soonest to expire first, or by client [default: by endpoint and client]
    #[arg(long, value_enum)]
    sort: Option<Order>,

    /// Only the first N rows of each table
    #[arg(long, value_name = "N")]
    top: Option<usize>,

    /// Print one JSON object a line
    #[arg(long)]
    json: bool,

    /// Recover a file first that was not closed cleanly and that nobody has open
    #[arg(long)]
    repair: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Order {
    Hits,
    Expires,
    Client,
}

fn main() -> ExitCode {
    cli::quiet_storage();
    let dump = Dump::parse();
    if let Some(Err(error)) = dump.endpoint.as_deref().map(|e| Key::new(e, "")) {
        Dump::command()
            .error(ErrorKind::ValueValidation, error)
            .exit();
    }
    match dump.run() {
        Ok(0) => ExitCode::SUCCESS,
        Ok(damaged) => cli::failure(
            "dump",
            format_args!(
                "{:?}: damaged rows: {damaged}; resetting their clients forgets them",
                dump.path()
            ),
        ),
        Err(error) => cli::failure("dump", error),
    }
}

impl Dump {
    fn path(&self) -> PathBuf {
        self.db.clone().unwrap_or_else(ratevault::default_path)
    }

    /// Prints what was asked for, and says how many rows were damaged.
    fn run(&self) -> Result<u64, Box<dyn Error>> {
        let path = self.path();
        let snapshot = Snapshot::builder(&path).repair(self.repair).open()?;
        let tables = snapshot.tables()?;
        let chosen: Vec<TableInfo> = match &self.table {
            None => tables,
            Some(name) => {
                // Says which tables there are, if this is none of them.
                drop(snapshot.rows(name)?);
                tables
                    .into_iter()
                    .filter(|table| table.name == *name)
                    .collect()
            }
        };
        let mut damaged = 0;
        let mut out = Paper::new(self.json);
        out.file(
            &Client::from(&*path.to_string_lossy()).to_string(),
            &about_file(&path)?,
        )?;
        for table in &chosen {
            damaged += self.table(&snapshot, table, &mut out)?;
            if out.nobody_reads {
                break;
            }
        }
        out.flush()?;
        Ok(damaged)
    }

    /// Prints one table, and says how many of its rows were damaged.
    fn table(
        &self,
        snapshot: &Snapshot,
        table: &TableInfo,
        out: &mut Paper,
    ) -> Result<u64, Box<dyn Error>> {
        let now = SystemClock.wall().as_millis();
        let mut rows = snapshot.rows(&table.name)?;
        if let Some(endpoint) = &self.endpoint {
            rows = rows.endpoint(endpoint)?;
        }
        out.head(table)?;
        let (mut totals, mut kept) = (Totals::default(), Vec::new());
        let limit = self.top.unwrap_or(usize::MAX);
        let mut shown = 0;
        for row in rows.by_ref() {
            let line = match row {
                Ok(entry) => Line::of(&table.name, &table.kind, &entry),
                Err(ratevault::Error::CorruptRow {
                    endpoint, client, ..
                }) => Line::damaged(&table.name, endpoint, client),
                Err(error) => {
                    out.flush()?;
                    return Err(error.into());
                }
            };
            totals.count(&line, now);
            if self.live && line.has_expired(now) {
                continue;
            }
            if let Some(order) = self.sort {
                kept.push(line);
                // A bounded selection needs no more than twice its size.
                if kept.len() >= limit.saturating_mul(2).max(1_000) {
                    order.select(&mut kept, limit);
                }
            } else if shown < limit {
                shown += 1;
                out.row(&line, now)?;
                if out.nobody_reads {
                    return Ok(totals.damaged);
                }
            }
        }
        if let Some(order) = self.sort {
            order.select(&mut kept, limit);
            kept.iter().try_for_each(|line| out.row(line, now))?;
        }
        let changed = self.endpoint.is_none() && rows.met() != rows.stated();
        out.totals(&totals, changed.then_some(rows.stated()))?;
        Ok(totals.damaged)
    }
}

impl Order {
    /// Sorts the lines, damaged ones first, and keeps the first `limit`.
    fn select(self, lines: &mut Vec<Line>, limit: usize) {
        lines.sort_by(|a, b| {
            let damaged = b.error.is_some().cmp(&a.error.is_some());
            damaged.then_with(|| match self {
                Self::Hits => b.hits.cmp(&a.hits),
                Self::Expires => a.expires_at_ms.cmp(&b.expires_at_ms),
                Self::Client => a.client.cmp(&b.client),
            })
        });
        lines.truncate(limit);
    }
}

/// `72 KiB, last written 2026-11-30 19:02:20 UTC`
fn about_file(path: &Path) -> io::Result<String> {
    let metadata = fs::metadata(path)?;
    let written = Timestamp::try_from(metadata.modified()?);
    let written = written.map_or("?".into(), |at| at.strftime("%F %T").to_string());
    let size = metadata.len().div_ceil(1_024);
    Ok(format!("{size} KiB, last written {written} UTC"))
}
