//! What is printed: a table for people, one JSON object a line for programs.

use serde::Serialize;

use crate::turns::{Quartiles, Standing};

/// What a peer costs under one load.
#[derive(Debug, Serialize)]
struct Figure {
    bench: &'static str,
    peer: &'static str,
    keys: u32,
    threads: usize,
    ns_per_check: f64,
    checks_per_s: f64,
    // Programs can work it out.
    #[serde(skip)]
    ratio: Quartiles,
}

/// The work that peers are compared on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    pub(crate) bench: &'static str,
    /// How many clients there are.
    pub(crate) keys: u32,
    /// How many checks are under way at a time.
    pub(crate) threads: usize,
}

impl Figure {
    fn new(load: Load, standing: Standing) -> Self {
        Self {
            bench: load.bench,
            peer: standing.peer,
            keys: load.keys,
            threads: load.threads,
            ns_per_check: (standing.ns_per_check * 10.0).round() / 10.0,
            checks_per_s: (1e9 / standing.ns_per_check).round(),
            ratio: standing.ratio,
        }
    }
}

/// Prints figures as they come.
#[derive(Debug)]
pub(crate) struct Report {
    json: bool,
    has_head: bool,
}

impl Report {
    pub(crate) const fn new(json: bool) -> Self {
        Self {
            json,
            has_head: false,
        }
    }

    /// Prints how the peers did under one load.
    pub(crate) fn add(&mut self, load: Load, standings: Vec<Standing>) {
        let figures = standings.into_iter().map(|of| Figure::new(load, of));
        if self.json {
            figures.for_each(|figure| print_json(&figure));
        } else {
            self.head();
            figures.for_each(|figure| print_row(&figure));
        }
    }

    /// The titles the first time, and a line between loads.
    fn head(&mut self) {
        if self.has_head {
            println!();
            return;
        }
        self.has_head = true;
        println!(
            "{:<14}  {:<16}  {:>9}  {:>7}  {:>12}  {:>12}  RATIO (QUARTILES)",
            "BENCH", "PEER", "KEYS", "THREADS", "NS/CHECK", "CHECKS/S"
        );
    }
}

fn print_json(figure: &Figure) {
    let line = serde_json::to_string(figure);
    println!("{}", line.expect("a figure has texts and numbers only"));
}

fn print_row(figure: &Figure) {
    let Quartiles { low, median, high } = figure.ratio;
    println!(
        "{:<14}  {:<16}  {:>9}  {:>7}  {:>12.0}  {:>12.0}  {median:.2} ({low:.2} to {high:.2})",
        figure.bench,
        figure.peer,
        figure.keys,
        figure.threads,
        figure.ns_per_check,
        figure.checks_per_s,
    );
}
