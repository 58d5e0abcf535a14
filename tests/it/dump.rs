//! `dump`, as its users run it: real processes, also beside one that writes.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use ratevault::{Error, FixedWindow, HitLog, Key, Limiter, Quota, SlidingWindow, Vault};
use serde_json::{Value, json};

use crate::support::desk::{Desk, example};
use crate::support::file::{Contents, damage_row};
use crate::support::{DAY, MINUTE, Number, START, key, manual_clock};

fn limiter(path: &Path) -> Limiter<SlidingWindow> {
    let vault = Vault::builder("rate_limits").path(path).open().unwrap();
    Limiter::new(
        vault,
        SlidingWindow::new(Quota::per_day(5).unwrap()).unwrap(),
    )
}

/// What `dump --json` printed, line by line.
fn objects(out: &str) -> Vec<Value> {
    out.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// `replay` as a process that writes: it answers each line once that is on disk.
struct Writer {
    child: Child,
    answers: BufReader<std::process::ChildStdout>,
}

impl Writer {
    fn start(path: &Path) -> Self {
        let mut child = Command::new(example("replay"))
            .args(["--quota", "100000/day", "--db"])
            .arg(path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        Self { child, answers }
    }

    fn hit(&mut self, client: &str) {
        let step = json!({"at": START, "client": client});
        writeln!(self.child.stdin.as_mut().unwrap(), "{step}").unwrap();
        let mut answer = String::new();
        assert!(self.answers.read_line(&mut answer).unwrap() > 0, "it ended");
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn end(mut self) {
        drop(self.child.stdin.take());
        assert!(self.child.wait().unwrap().success());
    }
}

#[test]
fn fifty_dumps_beside_a_busy_writer_all_succeed_and_see_newer_hits() {
    let desk = Desk::new();
    let path = desk.path("ratevault.redb");
    let limiter = limiter(&path);
    for client in 0..500 {
        drop(limiter.check_async("login", &client.to_string()));
    }
    limiter.vault().flush().unwrap();
    let hits = AtomicU64::new(0);
    let writes = || {
        for number in 0_u64.. {
            let client = (number % 700).to_string();
            match limiter.check("busy", &client) {
                Ok(_) => hits.fetch_add(1, Ordering::Relaxed),
                Err(Error::Closed { .. }) => return,
                Err(error) => panic!("{error}"),
            };
        }
    };
    thread::scope(|scope| {
        scope.spawn(writes);
        let closes = Closes(limiter.vault().clone());
        for round in 0..50 {
            // What is answered before a dump is in it.
            let newest = format!("round {round}");
            limiter.check("newest", &newest).unwrap();
            let rows = objects(&desk.dump(&["--json"]).printed(0));
            assert!(rows.len() > 500);
            assert!(rows.iter().any(|row| row["client"] == newest), "{newest}");
            for row in &rows {
                assert!((1..=5).contains(&row["hits"].as_u64().unwrap()), "{row}");
                assert!(row["first_ms"].as_u64() <= row["last_ms"].as_u64(), "{row}");
            }
        }
        drop(closes);
    });
    assert!(hits.into_inner() > 0, "it wrote meanwhile");
}

/// Ends whoever still writes, also when a test fails.
struct Closes(Vault<HitLog>);

impl Drop for Closes {
    fn drop(&mut self) {
        self.0.close().unwrap();
    }
}

#[test]
fn a_dump_that_is_left_half_read_does_not_make_the_file_grow() {
    let desk = Desk::new();
    let path = desk.path("ratevault.redb");
    let limiter = limiter(&path);
    // More than a page, and more than a pipe holds.
    for client in 0..30_000 {
        drop(limiter.check_async("login", &client.to_string()));
        if client % 10_000 == 0 {
            limiter.vault().flush().unwrap();
        }
    }
    let write = |commits: u32| {
        for commit in 0..commits {
            limiter.check("busy", &(commit % 50).to_string()).unwrap();
        }
        path.metadata().unwrap().len()
    };
    let before = write(200);
    let mut half_read = desk.command("dump", &["--json"]).spawn().unwrap();
    let mut out = half_read.stdout.take().unwrap();
    let mut first = [0; 1_000];
    out.read_exact(&mut first).unwrap();
    let after = write(2_000);
    // A transaction held open would have cost 15 KiB a commit, some 30 MB.
    assert!(after <= before + (4 << 20), "{before} grew to {after}");
    let mut rest = String::new();
    out.read_to_string(&mut rest).unwrap();
    assert!(half_read.wait().unwrap().success());
    assert!(rest.lines().count() >= 29_900);
}

#[test]
fn killing_a_dump_leaves_the_writer_unharmed() {
    let desk = Desk::new();
    let path = desk.path("ratevault.redb");
    let mut writer = Writer::start(&path);
    for round in 0..20 {
        writer.hit("ada");
        let mut dump = desk.command("dump", &["--json"]).spawn().unwrap();
        // At another moment each time.
        for _ in 0..round * 20 {
            writer.hit("ada");
        }
        dump.kill().unwrap();
        dump.wait().unwrap();
        writer.hit("ada");
    }
    let rows = objects(&desk.dump(&["--json"]).printed(0));
    assert_eq!(rows[0]["hits"], 20 * 2 + 20 * (0..20).sum::<u64>());
    writer.end();
}

#[test]
fn after_a_killed_writer_dump_says_what_happened_and_repairs_on_demand() {
    let desk = Desk::new();
    let path = desk.path("ratevault.redb");
    let mut writer = Writer::start(&path);
    for hit in 0..50 {
        writer.hit(["ada", "bob"][hit % 2]);
    }
    writer.kill();
    let said = desk.dump(&[]).failed("dump");
    assert!(
        said.contains("not closed cleanly") && said.contains("--repair"),
        "{said}"
    );
    let rows = objects(&desk.dump(&["--json", "--repair"]).printed(0));
    let hits: Vec<_> = rows
        .iter()
        .map(|row| (&row["client"], &row["hits"]))
        .collect();
    assert_eq!(
        hits,
        [(&json!("ada"), &json!(25)), (&json!("bob"), &json!(25))]
    );
    // From then on it is a file like any other.
    desk.dump(&[]).printed(0);
}

#[test]
fn json_has_these_keys_in_this_order() {
    let desk = Desk::new();
    let path = desk.path("ratevault.redb");
    let clock = manual_clock();
    let vault = Vault::builder("rate_limits")
        .path(&path)
        .clock(clock.clone());
    let window = SlidingWindow::new(Quota::per_minute(5).unwrap()).unwrap();
    let sliding = Limiter::new(vault.background_sweep(false).open().unwrap(), window);
    sliding.check("login", "ada").unwrap();
    clock.advance(Duration::from_millis(250));
    sliding.check("login", "ada").unwrap();
    let fixed = FixedWindow::new(Quota::per_minute(5).unwrap());
    let fixed = Limiter::new(Vault::builder("uploads").path(&path).open().unwrap(), fixed);
    fixed
        .check_n("up", std::net::Ipv4Addr::LOCALHOST, 3)
        .unwrap();
    let numbers: Vault<Number> = Vault::builder("numbers").path(&path).open().unwrap();
    numbers.put(&key("a"), Number(1), MINUTE).unwrap();
    let (first, last) = (START, START + 250);
    assert_eq!(
        desk.dump(&["--json"]).printed(0),
        format!(
            concat!(
                r#"{{"table":"numbers","kind":"number/1","endpoint":"test","client":"a","hits":null,"first_ms":null,"last_ms":null,"expires_at_ms":{}}}"#,
                "\n",
                r#"{{"table":"rate_limits","kind":"sliding-log/1","endpoint":"login","client":"ada","hits":2,"first_ms":{},"last_ms":{},"expires_at_ms":{}}}"#,
                "\n",
                r#"{{"table":"uploads","kind":"fixed-window/1","endpoint":"up","client":"127.0.0.1","hits":3,"first_ms":{},"last_ms":null,"expires_at_ms":{}}}"#,
                "\n",
            ),
            last + 60_000,
            first,
            last,
            last + 61_000,
            last,
            last + 61_000,
        )
    );
}

/// Clients that would like to control a terminal, break a line, or not be text at all.
const NASTY: [&[u8]; 8] = [
    b"\x1b[2J\x1b]0;title\x07",
    b"two\nlines\r\ttab",
    b"nul\0nul",
    b"\xff\xfe not text",
    "c1 \u{9b}31m del \u{7f}".as_bytes(),
    "bidi \u{202e}dlrow".as_bytes(),
    &[b'x'; 4_096],
    "\"quotes\" \\ {braces} 日本語 👩‍👩‍👧".as_bytes(),
];

#[test]
fn nothing_that_a_client_is_called_breaks_the_table_or_the_json() {
    let desk = Desk::new();
    let limiter = limiter(&desk.path("ratevault.redb"));
    for client in NASTY {
        limiter.check("end\npoint\x1b", client).unwrap();
    }
    let table = desk.dump(&[]).printed(0);
    let control = |c: char| c.is_control() && c != '\n' || c == '\u{202e}';
    assert!(!table.contains(control), "{table:?}");
    // The file, a gap, the table, the columns, the rows, the totals.
    assert_eq!(table.lines().count(), 4 + NASTY.len() + 1, "{table}");
    assert!(table.contains("sha256:"), "{table}");
    assert!(
        table.lines().all(|line| line.chars().count() <= 120),
        "{table}"
    );

    let json = desk.dump(&["--json"]).printed(0);
    assert!(
        !json.contains(|c: char| c.is_control() && c != '\n'),
        "{json:?}"
    );
    let rows = objects(&json);
    assert_eq!(rows.len(), NASTY.len());
    for client in NASTY.iter().filter(|client| client.len() < 256) {
        if let Ok(text) = std::str::from_utf8(client) {
            assert!(rows.iter().any(|row| row["client"] == text), "{text:?}");
        }
    }
    assert!(rows.iter().all(|row| row["endpoint"] == "end\npoint\x1b"));
}

#[test]
fn a_damaged_row_is_shown_as_such_and_the_program_ends_with_3() {
    let desk = Desk::new();
    let path = desk.path("ratevault.redb");
    let limiter = limiter(&path);
    for client in ["a", "b", "c"] {
        limiter.check("login", client).unwrap();
    }
    drop(limiter);
    let rows = Contents::read(&path, "rate_limits").rows;
    damage_row(&path, "rate_limits", rows.keys().nth(1).unwrap());
    let ended = desk.dump(&["--json"]);
    assert_eq!(
        ended.out.lines().nth(1),
        Some(r#"{"table":"rate_limits","endpoint":"login","client":"b","error":"corrupt"}"#)
    );
    assert_eq!(ended.out.lines().count(), 3);
    ended.failed("dump");
    let ended = desk.dump(&[]);
    assert!(ended.out.contains("corrupt"), "{}", ended.out);
    assert!(
        ended.out.contains("3 rows: 2 live, 0 expired, 1 corrupt"),
        "{}",
        ended.out
    );
    ended.failed("dump");
}

#[test]
fn a_damaged_row_is_called_in_json_what_a_whole_one_is_called() {
    let desk = Desk::new();
    let path = desk.path("ratevault.redb");
    let limiter = limiter(&path);
    limiter.check("lo\"g\\in", "\x1b\nada").unwrap();
    let name = |row: &Value| (row["endpoint"].clone(), row["client"].clone());
    let whole = objects(&desk.dump(&["--json"]).printed(0));
    drop(limiter);
    let rows = Contents::read(&path, "rate_limits").rows;
    damage_row(&path, "rate_limits", rows.keys().next().unwrap());
    let ended = desk.dump(&["--json"]);
    assert_eq!(name(&objects(&ended.out)[0]), name(&whole[0]));
    ended.failed("dump");
    let ended = desk.dump(&[]);
    assert!(!ended.out.contains('\x1b'), "{}", ended.out);
    ended.failed("dump");
}

#[test]
fn rows_are_chosen_sorted_and_cut() {
    let desk = Desk::new();
    let path = desk.path("ratevault.redb");
    let vault: Vault<HitLog> = Vault::builder("rate_limits").path(&path).open().unwrap();
    for (endpoint, client, hits, quota) in [
        ("login", "one", 1, "9/day"),
        ("login", "three", 3, "9/2d"),
        ("reset", "two", 2, "9/3d"),
    ] {
        let window = SlidingWindow::new(quota.parse().unwrap()).unwrap();
        let limiter = Limiter::new(vault.clone(), window);
        limiter.check_n(endpoint, client, hits).unwrap();
    }
    // Long gone by the wall clock, and swept by nobody.
    drop(vault);
    let clock = manual_clock();
    clock.set(ratevault::Timestamp::from_millis(1_000));
    let old = Vault::builder("rate_limits").path(&path).clock(clock);
    let old = Limiter::new(
        old.background_sweep(false).open().unwrap(),
        SlidingWindow::new(Quota::per_minute(9).unwrap()).unwrap(),
    );
    old.check_n("old", "gone", 9).unwrap();
    drop(old);

    let clients = |arguments: &[&str]| {
        let arguments = [&["--json"], arguments].concat();
        let rows = objects(&desk.dump(&arguments).printed(0));
        let clients = rows
            .iter()
            .map(|row| row["client"].as_str().unwrap().to_owned());
        clients.collect::<Vec<_>>().join(" ")
    };
    assert_eq!(clients(&[]), "gone one three two");
    assert_eq!(clients(&["--live"]), "one three two");
    assert_eq!(clients(&["--endpoint", "login"]), "one three");
    assert_eq!(clients(&["--endpoint", "log"]), "");
    assert_eq!(clients(&["--sort", "hits"]), "gone three two one");
    assert_eq!(
        clients(&["--sort", "hits", "--live", "--top", "2"]),
        "three two"
    );
    assert_eq!(clients(&["--sort", "expires"]), "gone one three two");
    assert_eq!(clients(&["--sort", "client"]), "gone one three two");
    assert_eq!(clients(&["--top", "1"]), "gone");
    let table = desk.dump(&["--table", "rate_limits"]).printed(0);
    assert!(table.contains("4 rows: 3 live, 1 expired"), "{table}");
    assert!(table.contains(" y ago"), "{table}");
    assert!(table.contains("1970-01-01 00:00:01"), "{table}");
}

#[test]
fn what_cannot_be_dumped_is_said_in_one_line() {
    let desk = Desk::new();
    let said = desk.dump(&[]).failed("dump");
    assert!(said.contains("ratevault.redb"), "{said}");
    assert!(desk.names().is_empty(), "it made nothing");
    let path = desk.path("ratevault.redb");
    std::fs::write(&path, "a text file, not a vault").unwrap();
    assert!(desk.dump(&[]).failed("dump").contains("not a vault"));
    std::fs::remove_file(&path).unwrap();
    let vault: Vault<Number> = Vault::builder("numbers")
        .path(&path)
        .exclusive()
        .open()
        .unwrap();
    assert!(desk.dump(&[]).failed("dump").contains("exclusive mode"));
    drop(vault);
    let said = desk.dump(&["--table", "none"]).failed("dump");
    assert!(
        said.contains("\"none\"") && said.contains("\"numbers\""),
        "{said}"
    );
    assert_eq!(desk.dump(&["--nonsense"]).code, Some(2));
}

#[test]
fn a_closed_pipe_ends_it_quietly() {
    let desk = Desk::new();
    let path = desk.path("ratevault.redb");
    let vault: Vault<Number> = Vault::builder("numbers").path(&path).open().unwrap();
    for number in 0..5_000_u64 {
        let key = Key::new("test", &number.to_string()).unwrap();
        drop(vault.update_async(&key, move |slot| slot.put(Number(number), DAY)));
    }
    vault.flush().unwrap();
    for arguments in [&["--json"][..], &[]] {
        let mut dump = desk.command("dump", arguments).spawn().unwrap();
        let mut first = [0; 10];
        dump.stdout.take().unwrap().read_exact(&mut first).unwrap();
        let ended = dump.wait_with_output().unwrap();
        assert_eq!((ended.status.code(), &*ended.stderr), (Some(0), &b""[..]));
    }
}
