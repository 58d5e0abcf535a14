//! What `dump` prints on: a table as wide as the terminal, or JSON lines.

use std::io::{self, BufWriter, Write};

use jiff::Timestamp;
use ratevault::{Client, TableInfo};
use unicode_width::UnicodeWidthChar;

use crate::cli;
use crate::line::Line;

#[derive(Debug, Default)]
pub(crate) struct Totals {
    pub(crate) rows: u64,
    pub(crate) expired: u64,
    pub(crate) damaged: u64,
}

impl Totals {
    pub(crate) fn count(&mut self, line: &Line, now: u64) {
        self.rows += 1;
        self.expired += u64::from(line.has_expired(now));
        self.damaged += u64::from(line.error.is_some());
    }
}

/// Standard output, as wide as the terminal.
pub(crate) struct Paper {
    out: BufWriter<io::StdoutLock<'static>>,
    json: bool,
    pub(crate) nobody_reads: bool,
    width: usize,
}

const WIDTH_OF_A_PIPE: usize = 120;
/// From how many columns on instants are shown with their year.
const WIDE: usize = 100;
/// How wide the columns of numbers are beside instants: the spaces, the hits, the distance.
const NUMBERS_WIDTH: usize = 1 + 10 + 2 + 2 + 2 + 10;

impl Paper {
    pub(crate) fn new(json: bool) -> Self {
        let terminal = terminal_size::terminal_size_of(io::stdout());
        Self {
            out: BufWriter::new(io::stdout().lock()),
            json,
            nobody_reads: false,
            width: terminal.map_or(WIDTH_OF_A_PIPE, |(width, _)| width.0.into()),
        }
    }

    pub(crate) fn line(&mut self, line: &str) -> io::Result<()> {
        if !self.nobody_reads {
            self.nobody_reads = !cli::still_read(writeln!(self.out, "{line}"))?;
        }
        Ok(())
    }

    pub(crate) fn flush(&mut self) -> io::Result<()> {
        cli::still_read(self.out.flush()).map(drop)
    }

    /// What is said of the file; of a long name its end is cut, not what is said.
    pub(crate) fn file(&mut self, name: &str, said: &str) -> io::Result<()> {
        if self.json {
            return Ok(());
        }
        let name = cut(name, self.width.saturating_sub(said.len() + 2).max(10));
        self.line(&cut(&format!("{name}: {said}"), self.width))
    }

    pub(crate) fn head(&mut self, table: &TableInfo) -> io::Result<()> {
        if self.json {
            return Ok(());
        }
        let (name, kind) = (Client::from(&table.name), Client::from(&table.kind));
        self.line("")?;
        self.line(&cut(&format!("{name} ({kind})"), self.width))?;
        self.columns(
            "ENDPOINT",
            "CLIENT",
            ["HITS", "FIRST HIT UTC", "LAST HIT UTC", "EXPIRES"].map(String::from),
        )
    }

    pub(crate) fn row(&mut self, line: &Line, now: u64) -> io::Result<()> {
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
                line.first_ms
                    .map_or_else(String::new, |ms| self.instant(ms)),
                line.last_ms.map_or_else(String::new, |ms| self.instant(ms)),
                distance(line.expires_at_ms, now),
            ],
        };
        self.columns(endpoint, client, numbers)
    }

    pub(crate) fn columns(
        &mut self,
        endpoint: &str,
        client: &str,
        [hits, first, last, expires]: [String; 4],
    ) -> io::Result<()> {
        let instants = if self.width < WIDE { 14 } else { 19 };
        let names = self.width.saturating_sub(NUMBERS_WIDTH + 2 * instants + 2);
        let names = names.clamp(23, 80);
        let endpoint = padded(endpoint, 8.max(names / 3));
        let client = padded(client, names - 8.max(names / 3));
        let line = format!(
            "{endpoint}  {client} {hits:>10}  {first:instants$}  {last:instants$}  {expires:10}"
        );
        self.line(cut(&line, self.width).trim_end())
    }

    /// `2026-11-30 19:02:20`, without the year where there is little room, or the number if no
    /// calendar has it.
    fn instant(&self, ms: u64) -> String {
        let format = if self.width < WIDE {
            "%m-%d %T"
        } else {
            "%F %T"
        };
        let instant = i64::try_from(ms).ok();
        let instant = instant.and_then(|ms| Timestamp::from_millisecond(ms).ok());
        instant.map_or_else(|| ms.to_string(), |at| at.strftime(format).to_string())
    }

    pub(crate) fn totals(&mut self, totals: &Totals, stated: Option<u64>) -> io::Result<()> {
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
        let totals = format!("{rows} {noun}: {live} live, {expired} expired{damaged}{changed}");
        self.line(&cut(&totals, self.width))
    }
}

/// `text` in at most `width` columns of the terminal, the last one `…` if it was cut.
pub(crate) fn cut(text: &str, width: usize) -> String {
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
pub(crate) fn padded(text: &str, width: usize) -> String {
    let mut text = cut(text, width);
    let columns: usize = text.chars().map(|c| c.width().unwrap_or(0)).sum();
    text.extend(std::iter::repeat_n(' ', width.saturating_sub(columns)));
    text
}

/// `in 41 s`, `3 min ago`.
pub(crate) fn distance(at: u64, now: u64) -> String {
    let seconds = at.abs_diff(now) / 1_000;
    let (count, unit) = match seconds {
        0..120 => (seconds, "s"),
        120..7_200 => (seconds / 60, "min"),
        7_200..172_800 => (seconds / 3_600, "h"),
        172_800..63_072_000 => (seconds / 86_400, "d"),
        _ => (seconds / 31_536_000, "y"),
    };
    if at > now {
        format!("in {count} {unit}")
    } else {
        format!("{count} {unit} ago")
    }
}
