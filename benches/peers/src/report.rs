//! What is printed: a table for people, one JSON object a line for programs.

use std::fmt::{self, Display};
use std::io::{self, Write};
use std::time::Duration;

use serde::Serialize;

use crate::load::Done;
use crate::turns::{Quartiles, Standing};

/// The work that peers are compared on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    pub(crate) bench: &'static str,
    /// How many clients there are.
    pub(crate) keys: u32,
    /// How many checks are under way at a time.
    pub(crate) threads: usize,
}

/// What a peer costs under one load. What does not apply is not there.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Figure {
    bench: &'static str,
    peer: &'static str,
    keys: u32,
    threads: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    ns_per_check: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    checks_per_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes_per_key: Option<f64>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    latency: Option<Latency>,
    #[serde(skip_serializing_if = "Option::is_none")]
    flush_every_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    flushes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rows_flushed: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    on_disk: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    seconds: Option<f64>,
    // Programs can work it out.
    #[serde(skip)]
    ratio: Option<Quartiles>,
    #[serde(skip)]
    allowed: Option<f64>,
}

/// How long single checks took.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Latency {
    pub(crate) p50_ns: u64,
    pub(crate) p99_ns: u64,
    pub(crate) max_ns: u64,
}

/// What went to the disk meanwhile.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Flushing {
    pub(crate) every: Duration,
    pub(crate) flushes: u64,
    pub(crate) rows_flushed: u64,
    /// Rows in the file at the end.
    pub(crate) on_disk: u64,
}

impl Flushing {
    /// What came since `earlier`.
    pub(crate) const fn since(self, earlier: Self) -> Self {
        Self {
            flushes: self.flushes - earlier.flushes,
            rows_flushed: self.rows_flushed - earlier.rows_flushed,
            ..self
        }
    }

    /// This, and then `later`.
    pub(crate) const fn and(self, later: Self) -> Self {
        Self {
            flushes: self.flushes + later.flushes,
            rows_flushed: self.rows_flushed + later.rows_flushed,
            ..later
        }
    }
}

impl Figure {
    pub(crate) const fn new(load: Load, peer: &'static str) -> Self {
        Self {
            bench: load.bench,
            peer,
            keys: load.keys,
            threads: load.threads,
            ns_per_check: None,
            checks_per_s: None,
            bytes_per_key: None,
            latency: None,
            flush_every_ms: None,
            flushes: None,
            rows_flushed: None,
            on_disk: None,
            seconds: None,
            ratio: None,
            allowed: None,
        }
    }

    pub(crate) fn done(self, done: Done) -> Self {
        let (checks, allowed) = (done.checks as f64, done.allowed as f64);
        Self {
            allowed: Some(allowed / checks),
            ..self.ns_per_check(done.seconds * 1e9 / checks)
        }
    }

    fn ns_per_check(self, ns: f64) -> Self {
        Self {
            ns_per_check: Some(rounded(ns, 1)),
            checks_per_s: Some(rounded(1e9 / ns, 0)),
            ..self
        }
    }

    pub(crate) fn bytes_per_key(self, bytes: f64) -> Self {
        Self {
            bytes_per_key: Some(rounded(bytes, 1)),
            ..self
        }
    }

    pub(crate) const fn latency(self, latency: Latency) -> Self {
        Self {
            latency: Some(latency),
            ..self
        }
    }

    pub(crate) fn seconds(self, seconds: f64) -> Self {
        Self {
            seconds: Some(rounded(seconds, 3)),
            ..self
        }
    }

    pub(crate) fn flushing(self, flushing: Flushing) -> Self {
        let every = u64::try_from(flushing.every.as_millis()).unwrap_or(u64::MAX);
        Self {
            flush_every_ms: Some(every),
            flushes: Some(flushing.flushes),
            rows_flushed: Some(flushing.rows_flushed),
            on_disk: Some(flushing.on_disk),
            ..self
        }
    }

    fn p99(&self) -> Option<f64> {
        self.latency.map(|latency| latency.p99_ns as f64)
    }

    /// What has no column.
    fn notes(&self) -> String {
        let mut notes = Vec::new();
        if let Some(Quartiles { low, median, high }) = self.ratio {
            notes.push(format!("{median:.2} ({low:.2} to {high:.2}) x the first"));
        }
        if let Some(allowed) = self.allowed {
            notes.push(format!("{:.0} % allowed", allowed * 100.0));
        }
        if let Some(bytes) = self.bytes_per_key {
            notes.push(format!("{bytes:.0} bytes per key"));
        }
        if let Some(Latency {
            p50_ns,
            p99_ns,
            max_ns,
        }) = self.latency
        {
            notes.push(format!("p50 {p50_ns} ns, p99 {p99_ns} ns, max {max_ns} ns"));
        }
        if let Some(seconds) = self.seconds {
            notes.push(format!("{seconds} s"));
        }
        if let (Some(flushes), Some(rows), Some(on_disk)) =
            (self.flushes, self.rows_flushed, self.on_disk)
        {
            notes.push(format!(
                "{flushes} flushes of {rows} rows, {on_disk} on disk"
            ));
        }
        notes.join("; ")
    }
}

fn rounded(figure: f64, places: i32) -> f64 {
    let scale = 10_f64.powi(places);
    (figure * scale).round() / scale
}

/// Prints figures as they come.
#[derive(Debug)]
pub(crate) struct Report {
    json: bool,
    figures: Vec<Figure>,
}

impl Report {
    pub(crate) const fn new(json: bool) -> Self {
        Self {
            json,
            figures: Vec::new(),
        }
    }

    /// Prints how the peers did under one load.
    pub(crate) fn add_standings(&mut self, load: Load, all: Vec<Standing>) -> io::Result<()> {
        let figure = |standing: Standing| Figure {
            ratio: Some(standing.ratio),
            ..Figure::new(load, standing.peer).ns_per_check(standing.ns_per_check)
        };
        self.add(all.into_iter().map(figure))
    }

    /// Prints figures that belong together.
    ///
    /// # Errors
    ///
    /// Nobody reads any more.
    pub(crate) fn add(&mut self, figures: impl IntoIterator<Item = Figure>) -> io::Result<()> {
        let mut out = io::stdout().lock();
        if !self.json {
            self.head(&mut out)?;
        }
        for figure in figures {
            if self.json {
                let line = serde_json::to_string(&figure).map_err(io::Error::other)?;
                writeln!(out, "{line}")?;
            } else {
                write_row(&mut out, &figure)?;
            }
            self.figures.push(figure);
        }
        out.flush()
    }

    /// The titles the first time, and a line between loads.
    fn head(&self, out: &mut impl Write) -> io::Result<()> {
        if !self.figures.is_empty() {
            return writeln!(out);
        }
        let titles = ["BENCH", "PEER", "KEYS", "THREADS", "NS/CHECK", "CHECKS/S"];
        let [bench, peer, keys, threads, ns, per_s] = titles;
        writeln!(
            out,
            "{bench:<15}  {peer:<17}  {keys:>9}  {threads:>7}  {ns:>10}  {per_s:>11}"
        )
    }

    /// Prints, for people, the quotients that matter, and what they may be.
    ///
    /// # Errors
    ///
    /// Nobody reads any more.
    pub(crate) fn conclude(&self) -> io::Result<()> {
        let rows = self.ratios();
        if self.json || rows.is_empty() {
            return Ok(());
        }
        let mut out = io::stdout().lock();
        writeln!(out)?;
        writeln!(
            out,
            "{:<34}  {:>9}  {:>7}  {:>7}  MUST BE",
            "RATIO", "KEYS", "THREADS", "IS"
        )?;
        for Ratio {
            name,
            keys,
            threads,
            is,
            bound,
        } in rows
        {
            writeln!(
                out,
                "{name:<34}  {keys:>9}  {threads:>7}  {is:>7.2}  {bound}"
            )?;
        }
        out.flush()
    }

    fn ratios(&self) -> Vec<Ratio> {
        let mut ratios = Vec::new();
        let ns = |figure: &Figure| figure.ns_per_check;
        let bytes = |figure: &Figure| figure.bytes_per_key;
        for keys in [1_000, 100_000, 1_000_000] {
            let bound = if keys == 1_000_000 { 2.5 } else { 1.5 };
            for threads in [1, 2] {
                let of = |peer| self.figure("decisions", peer, keys, threads);
                let (ours, rare) = (of("ours buffered"), of("ours buffered 1 h"));
                let governor = of("governor");
                let mut add = |name, over: Option<&Figure>, under, bound| {
                    ratios.extend(Ratio::of(name, over, under, ns, bound));
                };
                add(
                    "ours buffered / governor",
                    ours,
                    governor,
                    Bound::AtMost(bound),
                );
                add("ours buffered / flushed every 1 h", ours, rare, Bound::None);
            }
        }
        let mut add = |name, over: Option<&Figure>, under, of: fn(&Figure) -> _, bound| {
            ratios.extend(Ratio::of(name, over, under, of, bound));
        };
        for threads in [1, 64] {
            let of = |peer| self.figure("decisions", peer, 100_000, threads);
            let (ours, full, normal) =
                (of("ours committed"), of("sqlite full"), of("sqlite normal"));
            let bound = if threads == 64 {
                Bound::AtLeast(8.0)
            } else {
                Bound::None
            };
            add("sqlite full / ours committed", full, ours, ns, bound);
            add(
                "sqlite normal / ours committed",
                normal,
                ours,
                ns,
                Bound::None,
            );
        }
        let ours = |bench, keys| self.figure(bench, "ours buffered", keys, 1);
        let (long, short) = (ours("limit 10000", 1_000), ours("limit 10", 1_000));
        add(
            "limit 10000 / limit 10",
            long,
            short,
            ns,
            Bound::AtMost(1.3),
        );
        let memory = |peer| self.figure("memory", peer, 1_000_000, 1);
        let (own, governor) = (memory("ours buffered"), memory("governor"));
        add(
            "memory, ours / governor",
            own,
            governor,
            bytes,
            Bound::AtMost(2.0),
        );
        let latency = |bench| ours(bench, 100_000);
        let [rest, flush, sweep] = ["latency rest", "latency flush", "latency sweep"].map(latency);
        add(
            "p99 during flush / at rest",
            flush,
            rest,
            Figure::p99,
            Bound::AtMost(10.0),
        );
        add(
            "p99 during sweep / at rest",
            sweep,
            rest,
            Figure::p99,
            Bound::AtMost(10.0),
        );
        if let Some(open) = self.figure("open after kill", "ours committed", 1_000_000, 1)
            && let Some(seconds) = open.seconds
        {
            ratios.push(Ratio::new(
                "open after kill, in s",
                open,
                seconds,
                Bound::AtMost(1.0),
            ));
        }
        ratios
    }

    fn figure(&self, bench: &str, peer: &str, keys: u32, threads: usize) -> Option<&Figure> {
        self.figures.iter().find(|figure| {
            let load = (figure.bench, figure.peer, figure.keys, figure.threads);
            load == (bench, peer, keys, threads)
        })
    }
}

/// A quotient of two figures of one run.
#[derive(Clone, Copy, Debug)]
struct Ratio {
    name: &'static str,
    keys: u32,
    threads: usize,
    is: f64,
    bound: Bound,
}

/// What a ratio has to be.
#[derive(Clone, Copy, Debug)]
enum Bound {
    None,
    AtMost(f64),
    AtLeast(f64),
}

impl Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("-"),
            Self::AtMost(most) => write!(f, "<= {most}"),
            Self::AtLeast(least) => write!(f, ">= {least}"),
        }
    }
}

impl Ratio {
    const fn new(name: &'static str, figure: &Figure, is: f64, bound: Bound) -> Self {
        Self {
            name,
            keys: figure.keys,
            threads: figure.threads,
            is,
            bound,
        }
    }

    /// `None`: one of the two was not measured.
    fn of(
        name: &'static str,
        over: Option<&Figure>,
        under: Option<&Figure>,
        of: impl Fn(&Figure) -> Option<f64>,
        bound: Bound,
    ) -> Option<Self> {
        let (over, under) = (over?, under?);
        Some(Self::new(name, over, of(over)? / of(under)?, bound))
    }
}

fn write_row(out: &mut impl Write, figure: &Figure) -> io::Result<()> {
    let number = |number: Option<f64>| number.map_or_else(String::new, |it| format!("{it:.0}"));
    let row = format!(
        "{:<15}  {:<17}  {:>9}  {:>7}  {:>10}  {:>11}  {}",
        figure.bench,
        figure.peer,
        figure.keys,
        figure.threads,
        number(figure.ns_per_check),
        number(figure.checks_per_s),
        figure.notes(),
    );
    writeln!(out, "{}", row.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOAD: Load = Load {
        bench: "decisions",
        keys: 1_000,
        threads: 2,
    };

    fn done(checks: u64) -> Done {
        Done {
            checks,
            allowed: checks,
            seconds: 2.0,
        }
    }

    #[test]
    fn what_does_not_apply_is_not_in_the_json() {
        let figure = Figure::new(LOAD, "governor").done(done(20_000_000));
        assert_eq!(
            serde_json::to_string(&figure).expect("texts and numbers"),
            r#"{"bench":"decisions","peer":"governor","keys":1000,"threads":2,"ns_per_check":100.0,"checks_per_s":10000000.0}"#
        );
        let latency = Latency {
            p50_ns: 1,
            p99_ns: 2,
            max_ns: 3,
        };
        let flushing = Flushing {
            every: Duration::from_millis(100),
            flushes: 10,
            rows_flushed: 1_000,
            on_disk: 100,
        };
        let figure = Figure::new(LOAD, "ours buffered").latency(latency);
        let figure = figure.flushing(flushing).seconds(2.000_04);
        assert_eq!(
            serde_json::to_string(&figure).expect("texts and numbers"),
            r#"{"bench":"decisions","peer":"ours buffered","keys":1000,"threads":2,"p50_ns":1,"p99_ns":2,"max_ns":3,"flush_every_ms":100,"flushes":10,"rows_flushed":1000,"on_disk":100,"seconds":2.0}"#
        );
    }

    #[test]
    fn a_ratio_is_there_if_both_figures_are() {
        let mut report = Report::new(false);
        report.figures = vec![Figure::new(LOAD, "ours buffered").done(done(20_000_000))];
        assert!(report.ratios().is_empty());
        report
            .figures
            .push(Figure::new(LOAD, "governor").done(done(10_000_000)));
        let ratios = report.ratios();
        let [ratio] = ratios.as_slice() else {
            panic!("{ratios:?}");
        };
        assert_eq!((ratio.keys, ratio.threads, ratio.is), (1_000, 2, 0.5));
        assert_eq!(ratio.bound.to_string(), "<= 1.5");
    }
}
