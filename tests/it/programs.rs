//! The examples as their users run them: real processes, files and pipes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, SystemTime};

use ratevault::{Limiter, Quota, SlidingWindow, Vault};
use serde_json::Value;

use crate::opening;
use crate::support::desk::{Desk, Ended, feed};

/// The number between `before` and `after`.
#[track_caller]
fn number_in(text: &str, before: &str, after: &str) -> u64 {
    let number = text
        .strip_prefix(before)
        .and_then(|rest| rest.strip_suffix(after));
    match number.map(str::parse) {
        Some(Ok(number)) => number,
        _ => panic!("{text:?} is not {before:?} number {after:?}"),
    }
}

/// The seconds left, of a window of one minute.
#[track_caller]
fn seconds_in(text: &str, before: &str) {
    let seconds = number_in(text, before, " s\n");
    assert!((1..=60).contains(&seconds), "{text}");
}

// attempt

#[test]
fn of_six_attempts_in_a_row_the_sixth_is_refused() {
    let desk = Desk::new();
    for left in (0..5).rev() {
        let out = desk.attempt(&["login", "203.0.113.7"]).printed(0);
        seconds_in(&out, &format!("allowed: {left} of 5 left, resets in "));
    }
    let out = desk.attempt(&["login", "203.0.113.7"]).printed(1);
    seconds_in(&out, "refused: try again in ");
    let out = desk.attempt(&["login", "203.0.113.8"]).printed(0);
    seconds_in(&out, "allowed: 4 of 5 left, resets in ");
    let out = desk.attempt(&["register", "203.0.113.7"]).printed(0);
    seconds_in(&out, "allowed: 4 of 5 left, resets in ");
}

#[test]
fn of_twenty_attempts_at_once_five_are_allowed_and_none_fails() {
    let desk = Desk::new();
    twenty_at_once(&desk);
    assert_eq!(desk.names(), ["ratevault.redb".into()].into());
}

#[test]
fn of_twenty_attempts_at_once_after_a_crash_five_are_allowed() {
    let desk = Desk::new();
    // A file that is open looks as a crash would leave it.
    let path = desk.path("running.redb");
    let limiter = limiter(&path);
    limiter.check("login", "another").unwrap();
    fs::copy(&path, desk.path("ratevault.redb")).unwrap();
    drop(limiter);
    twenty_at_once(&desk);
}

fn twenty_at_once(desk: &Desk) {
    let running: Vec<_> = (0..20)
        .map(|_| {
            let mut command = desk.command("attempt", &["login", "ada", "--quota", "5/hour"]);
            command.spawn().unwrap()
        })
        .collect();
    let (mut left, mut refused) = (BTreeSet::new(), 0);
    for child in running {
        let ended = Ended::from(child.wait_with_output().unwrap());
        match ended.code {
            Some(0) => {
                let (answer, _) = ended.out.split_once(" left, ").unwrap();
                left.insert(number_in(answer, "allowed: ", " of 5"));
            }
            Some(1) => refused += 1,
            _ => panic!("{ended:?}"),
        }
        assert_eq!(ended.err, "");
    }
    assert_eq!(left, (0..5).collect());
    assert_eq!(refused, 15);
}

/// The limiter that `attempt` runs by default, in this process.
fn limiter(path: &Path) -> Limiter<SlidingWindow> {
    let vault = Vault::builder("rate_limits").path(path).open().unwrap();
    let quota = Quota::per_minute(5).unwrap();
    Limiter::new(vault, SlidingWindow::new(quota).unwrap())
}

#[test]
fn attempt_shares_its_counts_with_a_program_that_uses_the_library() {
    let desk = Desk::new();
    desk.attempt(&["login", "ada"]).printed(0);
    let limiter = limiter(&desk.path("ratevault.redb"));
    assert_eq!(limiter.check("login", "ada").unwrap().remaining(), 3);
    limiter.vault().close().unwrap();
    let out = desk.attempt(&["login", "ada"]).printed(0);
    seconds_in(&out, "allowed: 2 of 5 left, resets in ");
}

#[test]
fn a_cost_takes_as_many_places() {
    let desk = Desk::new();
    let out = desk.attempt(&["--cost", "3", "login", "ada"]).printed(0);
    seconds_in(&out, "allowed: 2 of 5 left, resets in ");
    let out = desk.attempt(&["--cost=3", "login", "ada"]).printed(1);
    seconds_in(&out, "refused: try again in ");
}

#[test]
fn of_several_quotas_the_tightest_speaks() {
    let desk = Desk::new();
    let quotas = ["--quota", "9/minute", "--quota", "3 per hour"];
    let attempt = || desk.attempt(&[&quotas[..], &["login", "ada"]].concat());
    for left in [2, 1, 0] {
        let out = attempt().printed(0);
        assert!(
            out.starts_with(&format!("allowed: {left} of 3 left, ")),
            "{out}"
        );
    }
    let out = attempt().printed(1);
    let seconds = number_in(&out, "refused: try again in ", " s\n");
    assert!((61..=3_600).contains(&seconds), "{out}");
}

#[test]
fn a_fixed_window_ignores_refusals_whether_or_not_it_is_told_to() {
    let desk = Desk::new();
    let fixed = ["--algorithm", "fixed", "--quota", "2/minute"];
    let ignore = [&fixed[..], &["--refusals", "ignore"]].concat();
    for (arguments, left) in [(&fixed[..], 1), (&ignore, 0)] {
        let out = desk.attempt(&[arguments, &["login", "ada"]].concat());
        seconds_in(
            &out.printed(0),
            &format!("allowed: {left} of 2 left, resets in "),
        );
    }
    desk.attempt(&[&fixed[..], &["login", "ada"]].concat())
        .printed(1);
}

#[test]
fn tables_count_apart_and_may_be_of_different_kinds() {
    let desk = Desk::new();
    for arguments in [
        &["--table", "one"][..],
        &["--table", "two"],
        &["--table", "three", "--algorithm", "fixed"],
    ] {
        let out = desk.attempt(&[arguments, &["login", "ada"]].concat());
        seconds_in(&out.printed(0), "allowed: 4 of 5 left, resets in ");
    }
    assert_eq!(desk.names().len(), 1);
}

#[test]
fn a_peek_says_what_is_left_and_counts_nothing() {
    let desk = Desk::new();
    let peek = || desk.attempt(&["--peek", "login", "ada"]).printed(0);
    assert_eq!(peek(), "5 of 5 left, resets in 0 s\n");
    assert_eq!(peek(), "5 of 5 left, resets in 0 s\n");
    desk.attempt(&["login", "ada"]).printed(0);
    seconds_in(&peek(), "4 of 5 left, resets in ");
    desk.attempt(&["--cost", "5", "login", "ada"]).printed(1);
    seconds_in(&peek(), "0 of 5 left, resets in ");
}

#[test]
fn a_reset_forgets_one_client() {
    let desk = Desk::new();
    for client in ["ada", "bob"] {
        desk.attempt(&["--cost", "5", "login", client]).printed(0);
    }
    // Also one that is not there.
    for client in ["ada", "nobody"] {
        let out = desk.attempt(&["--reset", "login", client]).printed(0);
        assert_eq!(out, "forgotten\n");
    }
    desk.attempt(&["login", "ada"]).printed(0);
    desk.attempt(&["login", "bob"]).printed(1);
}

#[test]
fn json_has_these_keys_in_this_order() {
    let desk = Desk::new();
    let before = wall_ms();
    let allowed = desk
        .attempt(&["--json", "login", "ada", "--cost", "5"])
        .printed(0);
    let after = wall_ms();
    let at = json(&allowed)["reset_at_ms"].as_u64().unwrap();
    assert_eq!(
        allowed,
        format!(
            "{{\"endpoint\":\"login\",\"client\":\"ada\",\"allowed\":true,\"limit\":5,\
             \"remaining\":0,\"reset_at_ms\":{at},\"retry_after\":null}}\n"
        )
    );
    // The program reads the clock to the ms, and may round it differently.
    assert!((before + 59_999..=after + 60_001).contains(&at), "{at}");

    let refused = desk.attempt(&["--json", "login", "ada"]).printed(1);
    let at = &json(&refused)["reset_at_ms"];
    let seconds = json(&refused)["retry_after"].as_u64().unwrap();
    assert!((1..=60).contains(&seconds), "{refused}");
    assert_eq!(
        refused,
        format!(
            "{{\"endpoint\":\"login\",\"client\":\"ada\",\"allowed\":false,\"limit\":5,\
             \"remaining\":0,\"reset_at_ms\":{at},\"retry_after\":{seconds}}}\n"
        )
    );

    let peeked = desk
        .attempt(&["--json", "--peek", "login", "ada"])
        .printed(0);
    let at = &json(&peeked)["reset_at_ms"];
    assert_eq!(
        peeked,
        format!(
            "{{\"endpoint\":\"login\",\"client\":\"ada\",\"limit\":5,\"remaining\":0,\
             \"reset_at_ms\":{at}}}\n"
        )
    );

    let reset = desk
        .attempt(&["--json", "--reset", "login", "ada"])
        .printed(0);
    assert_eq!(
        reset,
        "{\"endpoint\":\"login\",\"client\":\"ada\",\"reset\":true}\n"
    );
}

#[test]
fn json_is_one_line_whatever_the_client_is_called() {
    let desk = Desk::new();
    let client = "a\"b\nc\u{1b}[2J\u{e9}";
    let out = desk.attempt(&["--json", "", client]).printed(0);
    assert_eq!(out.lines().count(), 1);
    assert!(!out.contains('\u{1b}'));
    assert_eq!(json(&out)["client"], client);
    assert_eq!(json(&out)["endpoint"], "");
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

fn wall_ms() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    u64::try_from(since.unwrap().as_millis()).unwrap()
}

// Where the vault is

#[test]
fn db_beats_the_environment_which_beats_the_default() {
    let desk = Desk::new();
    let run = |environment: Option<&str>, db: Option<&str>| {
        let db: Vec<_> = db.into_iter().flat_map(|db| ["--db", db]).collect();
        let mut command = desk.command("attempt", &[&db[..], &["login", "ada"]].concat());
        command.envs(environment.map(|path| ("RATEVAULT_DB", path)));
        let out = Ended::from(command.output().unwrap()).printed(0);
        seconds_in(&out, "allowed: 4 of 5 left, resets in ");
        let names = desk.names();
        assert_eq!(names.len(), 1, "{names:?}");
        let name = names.into_iter().next().unwrap();
        fs::remove_file(desk.path(&name)).unwrap();
        name
    };
    assert_eq!(run(None, None), "ratevault.redb");
    assert_eq!(run(Some(""), None), "ratevault.redb");
    assert_eq!(run(Some("env.redb"), None), "env.redb");
    assert_eq!(run(Some("env.redb"), Some("db.redb")), "db.redb");
    assert_eq!(run(None, Some("db.redb")), "db.redb");
}

#[test]
fn replay_without_db_leaves_every_vault_alone_and_no_file_behind() {
    let desk = Desk::new();
    let temporary = desk.path("tmp");
    fs::create_dir(&temporary).unwrap();
    for (input, code) in [("{\"at\":0}\n", 0), ("{\"at\":0}\nbad\n", 3)] {
        let mut command = desk.command("replay", &["--quota", "2/s"]);
        command
            .env("RATEVAULT_DB", "env.redb")
            .env("TMPDIR", &temporary)
            .env("TMP", &temporary);
        assert_eq!(feed(command, input.as_bytes()).code, Some(code));
        assert_eq!(desk.names(), ["tmp".into()].into());
        assert_eq!(fs::read_dir(&temporary).unwrap().count(), 0);
    }
}

#[cfg(unix)]
#[test]
fn replay_that_cannot_make_its_file_says_so() {
    let desk = Desk::new();
    let mut command = desk.command("replay", &["--quota", "2/s"]);
    command.env("TMPDIR", desk.path("missing"));
    let line = feed(command, b"").failed("replay");
    assert!(line.contains("missing") && line.contains("--db"), "{line}");
}

#[cfg(unix)]
#[test]
fn a_path_need_not_be_text() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    let desk = Desk::new();
    let name = OsStr::from_bytes(b"\xff.redb");
    let mut command = desk.command("attempt", &["login", "ada", "--db"]);
    Ended::from(command.arg(name).output().unwrap()).printed(0);
    assert!(desk.0.path().join(name).is_file());
}

// Usage errors

/// Asserts that the programs call it a usage error, and make no file; what they say.
#[track_caller]
fn usage_error(program: &str, arguments: &[&str]) -> String {
    let desk = Desk::new();
    let ended = desk
        .command(program, arguments)
        .output()
        .map(Ended::from)
        .unwrap();
    assert_eq!((ended.code, &*ended.out), (Some(2), ""), "{arguments:?}");
    assert!(
        ended.err.starts_with("error: "),
        "{arguments:?}: {}",
        ended.err
    );
    assert!(desk.names().is_empty(), "{arguments:?}");
    ended.err
}

#[test]
fn attempt_ends_with_2_on_a_usage_error() {
    for (options, named) in [
        (&["--nonsense"][..], "--nonsense"),
        (&["one too many"], "one too many"),
        (&["--cost", "0"], "cost 0 "),
        (&["--cost", "6"], "between 1 and 5"),
        (&["--cost=-1"], "-1"),
        (&["--cost", "4294967296"], "4294967296"),
        (
            &["--quota", "9/s", "--quota", "2/h", "--cost", "3"],
            "between 1 and 2",
        ),
        (&["--algorithm", "fixed", "--cost", "6"], "between 1 and 5"),
        (&["--peek", "--reset"], "--reset"),
        (&["--peek", "--cost", "1"], "--peek"),
        (&["--reset", "--cost", "1"], "--reset"),
        (&["--algorithm", "square"], "square"),
        (&["--refusals", "maybe"], "maybe"),
        (&["--quota", "100001/s"], "100001"),
        (&["--db"], "--db"),
    ] {
        let said = usage_error("attempt", &[&["login", "ada"], options].concat());
        assert!(said.contains(named), "{options:?}: {said}");
    }
    assert!(usage_error("attempt", &["login"]).contains("CLIENT"));
    assert!(usage_error("attempt", &[]).contains("ENDPOINT"));
}

#[test]
fn replay_ends_with_2_on_a_usage_error() {
    assert!(usage_error("replay", &[]).contains("--quota"));
    for (options, named) in [
        (&["--nonsense"][..], "--nonsense"),
        (&["one too many"], "one too many"),
        (&["--algorithm", "square"], "square"),
        (&["--refusals", "maybe"], "maybe"),
        (&["--quota", "100001/s"], "100001"),
    ] {
        let said = usage_error("replay", &[&["--quota", "5/s"], options].concat());
        assert!(said.contains(named), "{options:?}: {said}");
    }
}

/// What either program needs beside its options.
const PROGRAMS: [(&str, &[&str]); 2] = [("attempt", &["login", "ada"]), ("replay", &[])];

#[test]
fn a_fixed_window_has_one_quota_and_cannot_count_refusals() {
    for (program, needed) in PROGRAMS {
        let fixed = [needed, &["--algorithm", "fixed", "--quota", "5/minute"]].concat();
        let said = usage_error(program, &[&fixed[..], &["--quota", "9/day"]].concat());
        assert!(said.contains("one --quota"), "{said}");
        let said = usage_error(program, &[&fixed[..], &["--refusals", "count"]].concat());
        assert!(said.contains("cannot count refusals"), "{said}");
    }
}

#[test]
fn a_bad_quota_is_a_usage_error_that_names_the_bad_part() {
    for (program, needed) in PROGRAMS {
        for (quota, part) in [
            ("5/minutes x", "\"minutes\""),
            ("0/s", "\"0\""),
            ("-1/s", "\"-1\""),
            ("5 minute", "\"5 minute\""),
            ("5/m", "\"m\""),
            ("5/1m1h", "\"h\""),
            ("99999999999/s", "\"99999999999\""),
            ("5/3651d", "ten years"),
            ("", "\"\""),
        ] {
            let option = format!("--quota={quota}");
            let said = usage_error(program, &[needed, &[&option]].concat());
            let named = format!("invalid quota {quota:?}: ");
            assert!(said.contains(&named), "{said}");
            assert!(said.contains(part), "{said}");
        }
    }
}

#[test]
fn a_usage_error_names_the_program() {
    let said = usage_error("attempt", &["login", "ada", "--cost", "0"]);
    assert!(said.contains("Usage: attempt "), "{said}");
    let said = usage_error("replay", &["--quota", "100001/s"]);
    assert!(said.contains("Usage: replay "), "{said}");
}

#[test]
fn help_names_every_option() {
    let desk = Desk::new();
    let shared = "--quota --algorithm --refusals --table --db";
    for (program, options) in [
        ("attempt", "--cost --peek --reset --json ENDPOINT CLIENT"),
        (
            "replay",
            "\"op\" \"at\" \"endpoint\" \"client\" \"cost\" reopen",
        ),
    ] {
        let ended = Ended::from(desk.command(program, &["--help"]).output().unwrap());
        let help = ended.printed(0);
        for option in shared.split(' ').chain(options.split(' ')) {
            assert!(help.contains(option), "{program} {option}: {help}");
        }
        assert!(help.contains("RATEVAULT_DB"), "{help}");
    }
}

// Any other error

/// Asserts that both programs refuse `path` in one line that names it and says what to do, and
/// leave the desk as it is.
fn assert_refused(desk: &Desk, path: &Path, advice: &str) {
    for (program, needed) in PROGRAMS {
        let before = contents(desk.0.path());
        let mut command = desk.command(program, needed);
        command.args(["--quota", "5/minute", "--db"]).arg(path);
        let ended = feed(command, b"{\"at\":0}\n");
        assert_eq!(ended.out, "", "{}", path.display());
        let line = ended.failed(program);
        // A relative path may be named in full.
        let named = format!("{path:?}");
        assert!(line.contains(named.trim_start_matches('"')), "{line}");
        assert!(line.contains(advice), "{line}");
        assert!(before == contents(desk.0.path()), "changed: {line}");
    }
}

/// Every file below a directory, with all its bytes.
fn contents(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(contents(&path));
            files.insert(path, Vec::new());
        } else {
            let bytes = fs::read(&path).unwrap();
            files.insert(path, bytes);
        }
    }
    files
}

#[test]
fn a_missing_directory_is_named() {
    let desk = Desk::new();
    let path = desk.path("missing").join("vault.redb");
    let directory = format!("{:?} does not exist; create it", desk.path("missing"));
    assert_refused(&desk, &path, &directory);
    assert_refused(&desk, Path::new("missing/vault.redb"), "create it");
}

#[test]
fn a_text_file_is_refused_unchanged() {
    let desk = Desk::new();
    let path = desk.path("notes.txt");
    fs::write(&path, "these are notes\n").unwrap();
    assert_refused(&desk, &path, "is not a vault");
    assert_refused(&desk, &path, "name another file");
}

#[test]
fn a_directory_is_refused() {
    let desk = Desk::new();
    let path = desk.path("directory");
    fs::create_dir(&path).unwrap();
    assert_refused(&desk, &path, "name another file");
    assert_refused(&desk, Path::new("directory"), "name another file");
}

#[test]
fn a_table_of_the_other_algorithm_is_refused_unchanged() {
    let desk = Desk::new();
    let path = desk.path("fixed.redb");
    opening::vault_of_fixed_windows(&path);
    assert_refused(&desk, &path, "name another table");
}

#[test]
fn a_newer_format_is_refused_unchanged() {
    let desk = Desk::new();
    let path = desk.path("newer.redb");
    opening::newer_vault(&path);
    assert_refused(&desk, &path, "use the newer version");
}

#[test]
fn a_truncated_vault_is_refused_unchanged() {
    let desk = Desk::new();
    let path = desk.path("truncated.redb");
    opening::truncated_vault(&path);
    assert_refused(&desk, &path, "restore a backup, or move the file away");
}

#[test]
fn a_path_of_two_lines_is_named_in_one() {
    let desk = Desk::new();
    let path = desk.path("two\nlines");
    fs::write(&path, "text").unwrap();
    assert_refused(&desk, &path, "name another file");
}

#[test]
fn a_vault_in_use_is_refused_and_its_user_unharmed() {
    let desk = Desk::new();
    let path = desk.path("used.redb");
    let limiter = limiter(&path);
    limiter.check("login", "ada").unwrap();
    assert_refused(&desk, &path, "stop that process");
    assert_eq!(limiter.check("login", "ada").unwrap().remaining(), 3);
}

// Pipes

/// Long enough for any machine; only a test that fails waits for it.
const PATIENCE: Duration = Duration::from_secs(60);

/// The writing end of a pipe that nobody reads.
fn closed_pipe() -> io::PipeWriter {
    io::pipe().unwrap().1
}

#[test]
fn attempt_ends_quietly_and_with_its_code_when_nobody_reads_its_output() {
    let desk = Desk::new();
    let attempt = |arguments: &[&str]| {
        let mut command = desk.command("attempt", arguments);
        Ended::from(command.stdout(closed_pipe()).output().unwrap())
    };
    for code in [0, 0, 0, 0, 0, 1] {
        attempt(&["login", "ada"]).printed(code);
    }
    attempt(&["--peek", "login", "ada"]).printed(0);
    attempt(&["--json", "--reset", "login", "ada"]).printed(0);
    attempt(&["--help"]).printed(0);
}

#[test]
fn codes_stay_when_nobody_reads_the_errors() {
    let desk = Desk::new();
    let ended = |mut command: Command, input: &[u8]| {
        command.stdout(closed_pipe()).stderr(closed_pipe());
        feed(command, input).code
    };
    let attempt = |arguments: &[&str]| {
        let arguments = [&["login", "ada"], arguments].concat();
        ended(desk.command("attempt", &arguments), b"")
    };
    assert_eq!(attempt(&["--cost", "5"]), Some(0));
    assert_eq!(attempt(&[]), Some(1));
    assert_eq!(attempt(&["--nonsense"]), Some(2));
    assert_eq!(attempt(&["--cost", "0"]), Some(2));
    assert_eq!(attempt(&["--db", "missing/vault.redb"]), Some(3));
    let replay = |input| ended(desk.command("replay", &["--quota", "5/s"]), input);
    assert_eq!(replay(b"{\"at\":0}\n"), Some(0));
    assert_eq!(replay(b"bad\n"), Some(3));
}

#[cfg(unix)]
#[test]
fn a_program_without_standard_streams_does_no_harm() {
    let desk = Desk::new();
    // The first files it opens would otherwise be what it prints to.
    let run = |arguments: &[&str]| {
        let mut shell = desk.command("attempt", &[]);
        let program = shell.get_program().to_owned();
        shell = Command::new("sh");
        let script = "exec \"$0\" \"$@\" <&- >&- 2>&-";
        shell.args(["-c", script]).arg(program).args(arguments);
        shell.env_remove("RATEVAULT_DB").current_dir(desk.0.path());
        shell.status().unwrap().code()
    };
    for code in [0, 0, 0, 0, 0, 1] {
        assert_eq!(run(&["login", "ada"]), Some(code));
    }
    assert_eq!(run(&["login", "ada", "--table", ""]), Some(2));
    assert_eq!(run(&["login", "ada", "--db", "missing/x"]), Some(3));
    desk.attempt(&["login", "ada"]).printed(1);
}

#[test]
fn replay_ends_quietly_when_nobody_reads_its_output() {
    let desk = Desk::new();
    let input = "{\"at\":0}\n".repeat(2_000);
    let mut command = desk.command("replay", &["--quota", "5/s"]);
    command.stdout(closed_pipe());
    let (_, summary) = went_well(feed(command, input.as_bytes()));
    // It gave up early.
    let (checks, _) = summary.split_once(", ").unwrap();
    assert!(number_in(checks, "checks ", "") < 2_000, "{summary}");
    assert_eq!(summary.lines().count(), 1, "{summary}");
}

#[test]
fn replay_ends_quietly_when_its_reader_has_read_enough() {
    let desk = Desk::new();
    let mut command = desk.command("replay", &["--quota", "5/s", "--db", "vault.redb"]);
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    stdin.write_all(b"{\"at\":0}\n").unwrap();
    let (sender, first) = mpsc::channel();
    thread::spawn(move || {
        let mut start = [0; 8];
        sender.send(stdout.read_exact(&mut start).map(|()| start))
    });
    // Having read this much, the reader is gone.
    let first = first.recv_timeout(PATIENCE).unwrap().unwrap();
    assert_eq!(&first, b"{\"at\":0,");
    // It notices when it writes, and then reads no more.
    let stopped = (0..20_000).any(|_| stdin.write_all(b"{\"at\":1}\n").is_err());
    drop(stdin);
    assert!(stopped);
    let ended = Ended::from(child.wait_with_output().unwrap());
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.err.starts_with("checks "), "{ended:?}");
    assert_eq!(ended.err.lines().count(), 1, "{ended:?}");
    // It closed the vault.
    let peeked = desk.replay(
        &["--quota", "5/s", "--db", "vault.redb"],
        "{\"op\":\"peek\",\"at\":1}",
    );
    assert_eq!(peeked.code, Some(0), "{peeked:?}");
}

// replay

const QUOTA: [&str; 2] = ["--quota", "2/minute"];

/// The output line of a check of the default client under `2/minute`.
fn checked(at: u64, allowed: bool, remaining: u32, reset_ms: u64, retry_after: &str) -> String {
    format!(
        "{{\"at\":{at},\"endpoint\":\"login\",\"client\":\"203.0.113.7\",\"allowed\":{allowed},\
         \"limit\":2,\"remaining\":{remaining},\"reset_ms\":{reset_ms},\
         \"retry_after\":{retry_after}}}\n"
    )
}

/// The output of a run that went well, and its summary.
#[track_caller]
fn went_well(ended: Ended) -> (String, String) {
    assert_eq!(ended.code, Some(0), "{ended:?}");
    (ended.out, ended.err)
}

#[test]
fn replay_answers_line_by_line_and_sums_up() {
    let desk = Desk::new();
    let input = concat!(
        "{\"at\":0}\n",
        "{\"op\":\"check\",\"at\":1,\"endpoint\":\"login\",\"client\":\"203.0.113.7\",\"cost\":1}\n",
        "{\"at\":2}\n",
        "{\"op\":\"peek\",\"at\":3}\n",
        "{\"op\":\"reset\",\"at\":4}\n",
        "{\"op\":\"reopen\",\"at\":5}\n",
        "{\"op\":\"peek\",\"at\":6}\n",
        "{\"at\":7,\"endpoint\":\"pay\",\"client\":\"a\\\"b\",\"cost\":2}",
    );
    let (out, err) = went_well(desk.replay(&QUOTA, input));
    let peeked = |at, remaining, reset_ms| {
        format!(
            "{{\"at\":{at},\"endpoint\":\"login\",\"client\":\"203.0.113.7\",\"limit\":2,\
             \"remaining\":{remaining},\"reset_ms\":{reset_ms}}}\n"
        )
    };
    let last = "{\"at\":7,\"endpoint\":\"pay\",\"client\":\"a\\\"b\",\"allowed\":true,\"limit\":2,\
                \"remaining\":0,\"reset_ms\":60000,\"retry_after\":null}\n";
    let expected = [
        &*checked(0, true, 1, 60_000, "null"),
        &checked(1, true, 0, 59_999, "null"),
        // The refusal counts, so the client has to wait until the hit at 1 goes.
        &checked(2, false, 0, 59_999, "60"),
        &peeked(3, 0, 59_998),
        "{\"op\":\"reset\"}\n",
        "{\"op\":\"reopen\"}\n",
        &peeked(6, 2, 0),
        last,
    ];
    assert_eq!(out, expected.concat());
    assert_eq!(err, "checks 4, allowed 3, refused 1, keys 2\n");
    assert!(desk.names().is_empty());
}

#[test]
fn an_empty_input_is_summed_up_too() {
    let (out, err) = went_well(Desk::new().replay(&QUOTA, ""));
    assert_eq!(out, "");
    assert_eq!(err, "checks 0, allowed 0, refused 0, keys 0\n");
}

#[test]
fn a_reopen_keeps_the_counts() {
    let desk = Desk::new();
    for options in [&[][..], &["--db", "vault.redb"], &["--algorithm", "fixed"]] {
        let input = "{\"at\":0,\"cost\":2}\n{\"op\":\"reopen\",\"at\":0}\n{\"at\":0}\n";
        let (out, _) = went_well(desk.replay(&[&QUOTA, options].concat(), input));
        let expected = [
            &*checked(0, true, 0, 60_000, "null"),
            "{\"op\":\"reopen\"}\n",
            &checked(0, false, 0, 60_000, "60"),
        ];
        assert_eq!(out, expected.concat(), "{options:?}");
    }
}

#[test]
fn a_second_run_goes_on_where_the_first_one_ended() {
    let desk = Desk::new();
    let arguments = [&QUOTA[..], &["--db", "vault.redb"]].concat();
    let (out, _) = went_well(desk.replay(&arguments, "{\"at\":0}\n{\"at\":0}\n"));
    assert_eq!(out.lines().count(), 2);
    assert_eq!(desk.names(), ["vault.redb".into()].into());
    let (out, err) = went_well(desk.replay(&arguments, "{\"at\":59999}\n"));
    assert_eq!(out, checked(59_999, false, 0, 1, "1"));
    assert_eq!(err, "checks 1, allowed 0, refused 1, keys 1\n");
    // Another table is another count.
    let another = [&arguments[..], &["--table", "another"]].concat();
    let (out, _) = went_well(desk.replay(&another, "{\"at\":59999}\n"));
    assert_eq!(out, checked(59_999, true, 1, 60_000, "null"));
}

#[test]
fn ignored_refusals_leave_nothing() {
    let desk = Desk::new();
    let input = "{\"at\":0,\"cost\":2}\n{\"at\":59999}\n{\"at\":60000}\n";
    let codes = |options: &[&str]| {
        let (out, _) = went_well(desk.replay(&[&QUOTA, options].concat(), input));
        let answers = out
            .lines()
            .map(|line| json(line)["allowed"].as_bool().unwrap());
        answers.collect::<Vec<_>>()
    };
    assert_eq!(codes(&["--refusals", "ignore"]), [true, false, true]);
    assert_eq!(codes(&["--refusals", "count"]), [true, false, true]);
    let input = "{\"at\":0,\"cost\":2}\n{\"at\":59999,\"cost\":2}\n{\"at\":60000}\n";
    let codes = |options: &[&str]| {
        let (out, _) = went_well(desk.replay(&[&QUOTA, options].concat(), input));
        let answers = out
            .lines()
            .map(|line| json(line)["allowed"].as_bool().unwrap());
        answers.collect::<Vec<_>>()
    };
    assert_eq!(codes(&["--refusals", "ignore"]), [true, false, true]);
    assert_eq!(codes(&["--refusals", "count"]), [true, false, false]);
    assert_eq!(codes(&[]), [true, false, false]);
    assert_eq!(codes(&["--algorithm", "fixed"]), [true, false, true]);
}

#[test]
fn the_clock_may_go_back() {
    let desk = Desk::new();
    let input = "{\"at\":90000}\n{\"at\":90000}\n{\"at\":10}\n{\"at\":60009}\n{\"at\":120009}\n";
    let (out, _) = went_well(desk.replay(&QUOTA, input));
    let expected = [
        checked(90_000, true, 1, 60_000, "null"),
        checked(90_000, true, 0, 60_000, "null"),
        // The hits are taken as made now, and the refusal counts.
        checked(10, false, 0, 60_000, "60"),
        checked(60_009, false, 0, 1, "1"),
        checked(120_009, true, 1, 60_000, "null"),
    ];
    assert_eq!(out, expected.concat());
}

#[test]
fn a_cost_that_can_never_fit_is_an_answer_and_the_run_goes_on() {
    let desk = Desk::new();
    for options in [&[][..], &["--algorithm", "fixed"]] {
        let input = concat!(
            "{\"at\":0,\"cost\":0}\n",
            "{\"at\":0,\"cost\":3}\n",
            "{\"at\":0,\"cost\":4294967295}\n",
            "{\"at\":0,\"cost\":4294967296}\n",
            "{\"at\":0,\"cost\":4294967297}\n",
            "{\"at\":0,\"cost\":18446744073709551615}\n",
            "{\"at\":0}\n",
        );
        let (out, err) = went_well(desk.replay(&[&QUOTA, options].concat(), input));
        let lines: Vec<_> = out.lines().collect();
        assert_eq!(lines.len(), 7);
        for line in &lines[..6] {
            let Value::Object(object) = json(line) else {
                panic!("{line}");
            };
            assert_eq!(object.keys().collect::<Vec<_>>(), ["error"]);
            assert!(
                object["error"].as_str().unwrap().contains("never fit"),
                "{line}"
            );
        }
        assert_eq!(
            format!("{}\n", lines[6]),
            checked(0, true, 1, 60_000, "null")
        );
        assert_eq!(err, "checks 1, allowed 1, refused 0, keys 1\n");
    }
}

/// Asserts that the third line ends the run, and what was before it is printed and stored.
fn assert_bad_line(bad: &[u8]) -> String {
    let desk = Desk::new();
    let arguments = [&QUOTA[..], &["--db", "vault.redb"]].concat();
    let input = [b"{\"at\":0}\n\n", bad, b"\n{\"at\":0}\n"].concat();
    let ended = desk.replay(&arguments, input);
    assert_eq!(ended.out, checked(0, true, 1, 60_000, "null"));
    let line = ended.failed("replay");
    assert!(line.contains("line 3"), "{line}");
    let (out, _) = went_well(desk.replay(&arguments, "{\"at\":0}\n"));
    assert_eq!(out, checked(0, true, 0, 60_000, "null"));
    line
}

#[test]
fn a_bad_line_is_numbered_and_what_came_before_it_stays() {
    for (bad, named) in [
        ("hello", ""),
        ("{}", "at"),
        ("{\"at\":-1}", "-1"),
        ("{\"at\":1.5}", "1.5"),
        ("{\"at\":\"0\"}", ""),
        ("{\"at\":18446744073709551616}", ""),
        ("{\"at\":0,\"cost\":-1}", "-1"),
        ("{\"at\":0,\"at\":0}", "at"),
        ("{\"at\":0,\"cots\":1}", "cots"),
        ("{\"at\":0,\"op\":\"chekc\"}", "chekc"),
        ("{\"at\":0,\"op\":\"Check\"}", "Check"),
        ("{\"at\":0,\"client\":7}", ""),
        ("{\"at\":0}{\"at\":0}", ""),
        ("{\"at\":0},", ""),
        ("{\"at\":0", ""),
        ("\u{feff}{\"at\":0}", ""),
    ] {
        let line = assert_bad_line(bad.as_bytes());
        assert!(line.contains(named), "{bad}: {line}");
    }
}

#[test]
fn a_line_that_is_no_text_is_a_bad_line() {
    assert_bad_line(b"{\"at\":0,\"client\":\"\xff\"}");
    assert_bad_line(b"\xff\xfe");
    assert_bad_line(b"\0");
}

#[test]
fn an_endpoint_that_is_too_long_is_a_bad_line() {
    let endpoint = "e".repeat(257);
    assert_bad_line(format!("{{\"at\":0,\"endpoint\":{endpoint:?}}}").as_bytes());
}

#[test]
fn blank_lines_and_carriage_returns_are_passed_over() {
    let desk = Desk::new();
    let input = "\r\n{\"at\":0}\r\n  \n\n\t{\"at\":0}  \n\n";
    let (out, err) = went_well(desk.replay(&QUOTA, input));
    let expected = [
        checked(0, true, 1, 60_000, "null"),
        checked(0, true, 0, 60_000, "null"),
    ];
    assert_eq!(out, expected.concat());
    assert_eq!(err, "checks 2, allowed 2, refused 0, keys 1\n");
}

/// A replay that is talked to line by line.
struct Talk {
    child: Child,
    input: ChildStdin,
    answers: mpsc::Receiver<String>,
}

impl Talk {
    fn new(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (sender, answers) = mpsc::channel();
        thread::spawn(move || {
            output
                .lines()
                .try_for_each(|line| sender.send(line.unwrap() + "\n"))
        });
        Self {
            child,
            input,
            answers,
        }
    }

    fn say(&mut self, text: &str) {
        self.input.write_all(text.as_bytes()).unwrap();
    }

    /// The next line of its output.
    #[track_caller]
    fn answer(&self) -> String {
        let answer = self.answers.recv_timeout(PATIENCE);
        answer.unwrap_or_else(|error| panic!("no answer: {error}"))
    }

    fn end(self) -> Ended {
        drop(self.input);
        self.child.wait_with_output().unwrap().into()
    }
}

#[test]
fn what_is_answered_is_printed_when_the_input_pauses() {
    let desk = Desk::new();
    let mut talk = Talk::new(desk.command("replay", &QUOTA));
    talk.say("{\"at\":0}\n");
    assert_eq!(talk.answer(), checked(0, true, 1, 60_000, "null"));
    // Two lines and a half at once.
    talk.say("{\"at\":0}\n{\"at\":0}\n{\"at\":");
    assert_eq!(talk.answer(), checked(0, true, 0, 60_000, "null"));
    assert_eq!(talk.answer(), checked(0, false, 0, 60_000, "60"));
    talk.say("60000}\n");
    assert_eq!(talk.answer(), checked(60_000, true, 1, 60_000, "null"));
    let ended = talk.end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(ended.err, "checks 4, allowed 3, refused 1, keys 1\n");
}

#[cfg(unix)]
#[test]
fn a_reopen_really_closes_the_file() {
    let desk = Desk::new();
    let arguments = [&QUOTA[..], &["--db", "vault.redb"]].concat();
    let mut talk = Talk::new(desk.command("replay", &arguments));
    talk.say("{\"at\":0}\n");
    assert_eq!(talk.answer(), checked(0, true, 1, 60_000, "null"));
    fs::rename(desk.path("vault.redb"), desk.path("moved.redb")).unwrap();
    talk.say("{\"op\":\"reopen\",\"at\":0}\n{\"at\":0}\n");
    // Who closes a file hears that it is no longer there.
    let error = talk.end().failed("replay");
    assert!(error.contains("vault.redb"), "{error}");
    assert!(error.contains("moved away"), "{error}");
    assert_eq!(desk.names().into_iter().collect::<Vec<_>>(), ["moved.redb"]);
    // The file was closed with its hit.
    let moved = [&QUOTA[..], &["--db", "moved.redb"]].concat();
    let (out, _) = went_well(desk.replay(&moved, "{\"at\":0}\n"));
    assert_eq!(out, checked(0, true, 0, 60_000, "null"));
}

#[test]
fn replay_agrees_with_the_vectors() {
    let traces: Vec<Value> =
        serde_json::from_str(include_str!("../vectors/decisions.json")).unwrap();
    assert!(traces.len() > 100);
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while let Some(trace) = traces.get(next.fetch_add(1, Ordering::Relaxed)) {
                    replay_trace(trace);
                }
            });
        }
    });
}

fn replay_trace(trace: &Value) {
    let name = trace["name"].as_str().unwrap();
    let mut arguments = vec![
        "--algorithm".into(),
        trace["algorithm"].as_str().unwrap().into(),
    ];
    arguments.extend([
        "--refusals".into(),
        trace["refusals"].as_str().unwrap().into(),
    ]);
    for quota in trace["quotas"].as_array().unwrap() {
        arguments.extend(["--quota".into(), format!("{}/{}ms", quota[0], quota[1])]);
    }
    let (mut input, mut expected) = (String::new(), Vec::new());
    for step in trace["steps"].as_array().unwrap() {
        let mut given = step.as_object().unwrap().clone();
        given.remove("expect");
        writeln!(input, "{}", Value::from(given)).unwrap();
        expected.push(expected_line(step));
    }
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (out, summary) = went_well(Desk::new().replay(&arguments, input));
    let found: Vec<_> = out.lines().collect();
    assert_eq!(found.len(), expected.len(), "{name}");
    for (number, (found, expected)) in found.iter().zip(&expected).enumerate() {
        match expected {
            Some(expected) => assert_eq!(found, expected, "{name}, step {number}"),
            None => assert!(
                found.starts_with("{\"error\":\""),
                "{name}, step {number}: {found}"
            ),
        }
    }
    assert_eq!(summary, expected_summary(&found), "{name}");
}

/// The line that a step is answered with; none for an error, whose text is not laid down.
fn expected_line(step: &Value) -> Option<String> {
    let expect = &step["expect"];
    let op = step["op"].as_str().unwrap();
    if matches!(op, "reset" | "reopen") {
        return Some(format!("{{\"op\":\"{op}\"}}"));
    }
    if expect["error"] == true {
        return None;
    }
    let name = |key: &str, default: &str| match &step[key] {
        Value::Null => Value::from(default),
        name => name.clone(),
    };
    let mut line = format!("{{\"at\":{},", step["at"]);
    write!(line, "\"endpoint\":{},", name("endpoint", "login")).unwrap();
    write!(line, "\"client\":{},", name("client", "203.0.113.7")).unwrap();
    if op == "check" {
        write!(line, "\"allowed\":{},", expect["allowed"]).unwrap();
    }
    write!(line, "\"limit\":{},", expect["limit"]).unwrap();
    write!(line, "\"remaining\":{},", expect["remaining"]).unwrap();
    write!(line, "\"reset_ms\":{}", expect["reset_ms"]).unwrap();
    if op == "check" {
        write!(line, ",\"retry_after\":{}", expect["retry_after"]).unwrap();
    }
    line.push('}');
    Some(line)
}

/// What the output lines of a run come to.
fn expected_summary(lines: &[&str]) -> String {
    let lines: Vec<_> = lines.iter().map(|line| json(line)).collect();
    let checks: Vec<_> = lines
        .iter()
        .filter(|line| line["allowed"].is_boolean())
        .collect();
    let allowed = checks.iter().filter(|line| line["allowed"] == true).count();
    let keys: BTreeSet<_> = checks
        .iter()
        .map(|line| (line["endpoint"].to_string(), line["client"].to_string()))
        .collect();
    format!(
        "checks {}, allowed {allowed}, refused {}, keys {}\n",
        checks.len(),
        checks.len() - allowed,
        keys.len()
    )
}

// soak

#[test]
fn a_soak_of_some_seconds_loses_nothing_and_says_so() {
    let desk = Desk::new();
    let soak = desk.command("soak", &["--seconds", "4"]).output().unwrap();
    let out = Ended::from(soak).printed(0);
    let lines: Vec<_> = out.lines().collect();
    assert!(lines[0].starts_with("in all, committed: checks "), "{out}");
    assert!(lines[1].starts_with("in all, buffered: checks "), "{out}");
    assert!(lines[2].starts_with("in all: checks "), "{out}");
    assert!(!lines[2].contains("checks 0,"), "{out}");
    assert!(
        lines
            .iter()
            .all(|line| line.contains(", lost 0, wrong 0, ")),
        "{out}"
    );
    assert_eq!(desk.names(), BTreeSet::new(), "it leaves nothing behind");
}
