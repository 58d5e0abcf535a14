//! What a vault holds: for people a table, for programs one JSON object a line.
//!
//! ```text
//! dump --live --sort hits --top 20
//! dump --json | jq 'select(.hits > 3)'
//! ```

mod cli;

use std::error::Error;
use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use jiff::Timestamp;
use ratevault::{Client, Clock, Entry, Snapshot, State, SystemClock, TableInfo};
use serde::Serialize;
use unicode_width::UnicodeWidthChar;

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
    let dump = Dump::parse();
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
        if !self.json {
            out.line(&about_file(&path)?)?;
        }
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

/// `limits.redb: 72 KiB, last written 2026-11-30 19:02:20 UTC`
fn about_file(path: &Path) -> io::Result<String> {
    let metadata = fs::metadata(path)?;
    let written = Timestamp::try_from(metadata.modified()?);
    let written = written.map_or("?".into(), |at| at.strftime("%F %T").to_string());
    let size = metadata.len().div_ceil(1_024);
    let name = path.to_string_lossy();
    let name = Client::from(&*name);
    Ok(format!("{name}: {size} KiB, last written {written} UTC"))
}

/// One row, as it is printed.
#[derive(Debug, Default)]
struct Line {
    table: String,
    kind: String,
    endpoint: String,
    client: String,
    hits: Option<u64>,
    first_ms: Option<u64>,
    last_ms: Option<u64>,
    expires_at_ms: u64,
    error: Option<&'static str>,
    /// For people: endpoint and client, escaped.
    readable: (String, String),
}

#[derive(Serialize)]
struct RowJson<'a> {
    table: &'a str,
    kind: &'a str,
    endpoint: &'a str,
    client: &'a str,
    hits: Option<u64>,
    first_ms: Option<u64>,
    last_ms: Option<u64>,
    expires_at_ms: u64,
}

#[derive(Serialize)]
struct DamagedJson<'a> {
    table: &'a str,
    endpoint: &'a str,
    client: &'a str,
    error: &'a str,
}

impl Line {
    fn of(table: &str, kind: &str, entry: &Entry<State>) -> Self {
        let endpoint = entry.key.endpoint();
        let client = entry.key.client();
        let readable = (Client::from(&*endpoint).to_string(), client.to_string());
        let text = match client {
            Client::Text(text) => std::str::from_utf8(text).ok().map(str::to_owned),
            _ => None,
        };
        let (hits, first_ms, last_ms) = match &entry.value {
            State::SlidingLog(log) => {
                let mut times = log.times();
                let first = times.next().map(|hit| hit.as_millis());
                let last = times.next_back().map(|hit| hit.as_millis());
                (Some(log.times().len() as u64), first, last.or(first))
            }
            State::FixedWindow(count) => {
                let start = count.start().as_millis();
                (Some(count.used().into()), Some(start), None)
            }
            _ => (None, None, None),
        };
        Self {
            table: table.to_owned(),
            kind: kind.to_owned(),
            client: text.unwrap_or_else(|| readable.1.clone()),
            endpoint: endpoint.into_owned(),
            hits,
            first_ms,
            last_ms,
            expires_at_ms: entry.expires_at.as_millis(),
            error: None,
            readable,
        }
    }

    fn damaged(table: &str, endpoint: String, client: String) -> Self {
        Self {
            table: table.to_owned(),
            endpoint: endpoint.clone(),
            client: client.clone(),
            error: Some("corrupt"),
            readable: (endpoint, client),
            ..Self::default()
        }
    }

    fn has_expired(&self, now: u64) -> bool {
        self.error.is_none() && self.expires_at_ms <= now
    }

    fn json(&self) -> serde_json::Result<String> {
        let mut bytes = Vec::new();
        let mut serializer = serde_json::Serializer::with_formatter(&mut bytes, Harmless);
        match self.error {
            Some(error) => DamagedJson {
                table: &self.table,
                endpoint: &self.endpoint,
                client: &self.client,
                error,
            }
            .serialize(&mut serializer),
            None => RowJson {
                table: &self.table,
                kind: &self.kind,
                endpoint: &self.endpoint,
                client: &self.client,
                hits: self.hits,
                first_ms: self.first_ms,
                last_ms: self.last_ms,
                expires_at_ms: self.expires_at_ms,
            }
            .serialize(&mut serializer),
        }?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// JSON whose strings hold no control character, also not those that JSON itself lets pass.
struct Harmless;

impl serde_json::ser::Formatter for Harmless {
    fn write_string_fragment<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        for part in fragment.split_inclusive(char::is_control) {
            match part.chars().next_back().filter(|last| last.is_control()) {
                Some(last) => {
                    let harmless = part.trim_end_matches(char::is_control);
                    write!(writer, "{harmless}\\u{:04x}", u32::from(last))?;
                }
                None => writer.write_all(part.as_bytes())?,
            }
        }
        Ok(())
    }
}

#[derive(Debug, Default)]
struct Totals {
    rows: u64,
    expired: u64,
    damaged: u64,
}

impl Totals {
    fn count(&mut self, line: &Line, now: u64) {
        self.rows += 1;
        self.expired += u64::from(line.has_expired(now));
        self.damaged += u64::from(line.error.is_some());
    }
}

/// Standard output, as wide as the terminal.
struct Paper {
    out: BufWriter<io::StdoutLock<'static>>,
    json: bool,
    nobody_reads: bool,
    width: usize,
}

/// How wide the columns after endpoint and client are, with the spaces before them.
const NUMBERS_WIDTH: usize = 8 + 21 + 21 + 14;
const WIDTH_OF_A_PIPE: usize = 120;

impl Paper {
    fn new(json: bool) -> Self {
        let terminal = terminal_size::terminal_size_of(io::stdout());
        Self {
            out: BufWriter::new(io::stdout().lock()),
            json,
            nobody_reads: false,
            width: terminal.map_or(WIDTH_OF_A_PIPE, |(width, _)| width.0.into()),
        }
    }

    fn line(&mut self, line: &str) -> io::Result<()> {
        if !self.nobody_reads {
            self.nobody_reads = !cli::still_read(writeln!(self.out, "{line}"))?;
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        cli::still_read(self.out.flush()).map(drop)
    }

    fn head(&mut self, table: &TableInfo) -> io::Result<()> {
        if self.json {
            return Ok(());
        }
        let (name, kind) = (Client::from(&table.name), Client::from(&table.kind));
        self.line("")?;
        self.line(&cut(&format!("{name} ({kind})"), self.width))?;
        self.columns(
            "ENDPOINT",
            "CLIENT",
            ["HITS", "FIRST HIT (UTC)", "LAST HIT (UTC)", "EXPIRES"].map(String::from),
        )
    }

    fn row(&mut self, line: &Line, now: u64) -> io::Result<()> {
        if self.json {
            let json = line.json()?;
            return self.line(&json);
        }
        let (endpoint, client) = &line.readable;
        let numbers = match line.error {
            Some(error) => [
                error.to_owned(),
                String::new(),
                String::new(),
                String::new(),
            ],
            None => [
                line.hits.map_or_else(String::new, |hits| hits.to_string()),
                line.first_ms.map_or_else(String::new, instant),
                line.last_ms.map_or_else(String::new, instant),
                distance(line.expires_at_ms, now),
            ],
        };
        self.columns(endpoint, client, numbers)
    }

    fn columns(
        &mut self,
        endpoint: &str,
        client: &str,
        [hits, first, last, expires]: [String; 4],
    ) -> io::Result<()> {
        let names = self.width.saturating_sub(NUMBERS_WIDTH + 2).clamp(20, 80);
        let (endpoint, client) = (
            padded(endpoint, names / 3),
            padded(client, names - names / 3),
        );
        let line = format!("{endpoint}  {client} {hits:>7}  {first:19}  {last:19}  {expires:12}");
        self.line(cut(&line, self.width).trim_end())
    }

    fn totals(&mut self, totals: &Totals, stated: Option<u64>) -> io::Result<()> {
        let Totals {
            rows,
            expired,
            damaged,
        } = totals;
        let changed =
            stated.map(|stated| format!("; the table changed meanwhile to {stated} rows"));
        let changed = changed.unwrap_or_default();
        if self.json {
            if !changed.is_empty() {
                // Nobody is left to hear that standard error is closed.
                let _ = writeln!(io::stderr().lock(), "dump: {rows} rows{changed}");
            }
            return Ok(());
        }
        let live = rows - expired - damaged;
        let damaged = match damaged {
            0 => String::new(),
            damaged => format!(", {damaged} corrupt"),
        };
        let noun = if *rows == 1 { "row" } else { "rows" };
        self.line(&format!(
            "{rows} {noun}: {live} live, {expired} expired{damaged}{changed}"
        ))
    }
}

/// `text` in at most `width` columns of the terminal, the last one `…` if it was cut.
fn cut(text: &str, width: usize) -> String {
    let columns = |text: &str| text.chars().map(|c| c.width().unwrap_or(0)).sum::<usize>();
    if columns(text) <= width {
        return text.to_owned();
    }
    let mut left = width.saturating_sub(1);
    let fits = |c: &char| {
        let fits = c.width().unwrap_or(0) <= left;
        left = left.saturating_sub(c.width().unwrap_or(0));
        fits
    };
    let mut short: String = text.chars().take_while(fits).collect();
    short.push('…');
    short
}

/// `text` in exactly `width` columns.
fn padded(text: &str, width: usize) -> String {
    let mut text = cut(text, width);
    let columns: usize = text.chars().map(|c| c.width().unwrap_or(0)).sum();
    text.extend(std::iter::repeat_n(' ', width.saturating_sub(columns)));
    text
}

/// `2026-11-30 19:02:20`, or the number if no calendar has it.
fn instant(ms: u64) -> String {
    let instant = i64::try_from(ms)
        .ok()
        .and_then(|ms| Timestamp::from_millisecond(ms).ok());
    instant.map_or_else(|| ms.to_string(), |at| at.strftime("%F %T").to_string())
}

/// `in 41 s`, `3 min ago`.
fn distance(at: u64, now: u64) -> String {
    let seconds = at.abs_diff(now) / 1_000;
    let (count, unit) = match seconds {
        0..120 => (seconds, "s"),
        120..7_200 => (seconds / 60, "min"),
        7_200..172_800 => (seconds / 3_600, "h"),
        _ => (seconds / 86_400, "d"),
    };
    if at > now {
        format!("in {count} {unit}")
    } else {
        format!("{count} {unit} ago")
    }
}
