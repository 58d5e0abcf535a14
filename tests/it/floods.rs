//! Floods: clients choose keys and headers, and come as often as they like.

mod crowd;
mod forgetting;
#[cfg(feature = "axum")]
mod headers;
mod pairs;

use std::fmt;
use std::io::{self, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Set for the process of a flood.
const FLOODED: &str = "RATEVAULT_FLOODED";

/// What a flood costs the process that bears it, in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Cost {
    memory: u64,
    file: u64,
}

/// Runs the test `name` in a process of its own, and returns the lines that it says.
fn flood(name: &str) -> Vec<String> {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--ignored", "--nocapture"])
        .arg(format!("floods::{name}"))
        .env(FLOODED, "1")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    said.lines().map(str::to_owned).collect()
}

/// Whether this is the process of a flood.
fn is_flooded() -> bool {
    std::env::var_os(FLOODED).is_some()
}

/// Says a line to the test that started this process.
fn say(line: impl fmt::Display) {
    writeln!(io::stderr().lock(), "{line}").unwrap();
}

/// The most memory this process has ever held.
fn peak_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kilobytes = line.and_then(|line| line.trim().strip_suffix(" kB"));
    kilobytes.unwrap().parse::<u64>().unwrap() * 1_024
}

impl Cost {
    fn say(self) {
        let Self { memory, file } = self;
        say(format_args!("{memory} {file}"));
    }

    /// What was said.
    fn heard(line: &str) -> Self {
        let numbers: Vec<_> = line.split(' ').map(|word| word.parse().unwrap()).collect();
        Self {
            memory: numbers[0],
            file: numbers[1],
        }
    }
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let megabytes = |bytes| bytes as f64 / 1e6;
        let (memory, file) = (megabytes(self.memory), megabytes(self.file));
        write!(f, "memory {memory:.0} MB, file {file:.1} MB")
    }
}

/// How long calls took: median, one in a hundred, one in a thousand, the longest.
fn latencies(mut took: Vec<Duration>) -> String {
    took.sort_unstable();
    let at = |share: f64| took[((took.len() - 1) as f64 * share) as usize];
    let (half, hundredth, thousandth) = (at(0.5), at(0.99), at(0.999));
    format!(
        "a check took {half:?}, 1 in 100 {hundredth:?}, 1 in 1,000 {thousandth:?}, the longest {:?}",
        at(1.0)
    )
}
