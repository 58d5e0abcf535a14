//! The login server as its users meet it: a real process, its file and clients over loopback.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use http::Method;

use crate::support::client::{Answer, runtime};
use crate::support::desk::{Desk, Ended};
use crate::support::server::{DB, RIGHT, Server, WRONG, assert_admitted, assert_refused, refused};

// What a client is told

fn unix_seconds() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.unwrap().as_secs()
}

/// Asserts the headers that every answer has; the window is one of `seconds`.
#[track_caller]
fn assert_counted(answer: &Answer, status: u16, [limit, remaining]: [u64; 2], seconds: u64) {
    assert_eq!(answer.status, status, "{answer:?}");
    assert_eq!(answer.number("x-ratelimit-limit"), limit);
    assert_eq!(answer.number("x-ratelimit-remaining"), remaining);
    let (now, reset) = (unix_seconds(), answer.number("x-ratelimit-reset"));
    // Rounded up, so a second more than the window.
    assert!((now..=now + seconds + 1).contains(&reset), "{now} {reset}");
}

/// Asserts a refusal that says when to come back.
#[track_caller]
fn assert_sent_away(answer: &Answer, limit: u64, seconds: u64) {
    assert_counted(answer, 429, [limit, 0], seconds);
    let wait = answer.number("retry-after");
    assert!((1..=seconds).contains(&wait), "{answer:?}");
    let unit = if wait == 1 { "second" } else { "seconds" };
    let text = format!("Too many requests: try again in {wait} {unit}.\n");
    assert_eq!(answer.body, text);
}

#[test]
fn five_wrong_logins_are_answered_and_the_sixth_is_refused() {
    let desk = Desk::new();
    let server = Server::start(&desk, &[]);
    for remaining in (0..5).rev() {
        let answer = server.client().post("/login", WRONG);
        assert_counted(&answer, 401, [5, remaining], 60);
        assert_eq!(answer.field("retry-after"), None);
    }
    assert_sent_away(&server.client().post("/login", WRONG), 5, 60);
    // The right password does not help any more.
    assert_sent_away(&server.client().post("/login", RIGHT), 5, 60);
}

#[test]
fn the_right_password_is_welcome_and_counts_like_any_other() {
    let desk = Desk::new();
    let server = Server::start(&desk, &[]);
    let answer = server.client().post("/login", RIGHT);
    assert_counted(&answer, 200, [5, 4], 60);
    assert_eq!(answer.body, "Welcome, ada.\n");
    assert_admitted(&server.client(), 3);
}

#[test]
fn registrations_and_password_resets_have_limits_of_their_own() {
    let desk = Desk::new();
    let server = Server::start(&desk, &[]);
    refused(&server.client());
    for (path, form, limit) in [
        ("/register", "user=bob&password=secret", 5),
        ("/password-reset", "user=bob", 3),
    ] {
        for remaining in (0..limit).rev() {
            let answer = server.client().post(path, form);
            assert_counted(&answer, 202, [limit, remaining], 3_600);
        }
        assert_sent_away(&server.client().post(path, form), limit, 3_600);
    }
}

#[test]
fn the_quota_asked_for_is_the_logins_alone() {
    let desk = Desk::new();
    let server = Server::start(&desk, &["--quota", "2/day"]);
    let client = server.client();
    assert_counted(&client.post("/login", WRONG), 401, [2, 1], 86_400);
    let answer = client.post("/register", "user=bob&password=secret");
    assert_counted(&answer, 202, [5, 4], 3_600);
    let answer = client.post("/password-reset", "user=bob");
    assert_counted(&answer, 202, [3, 2], 3_600);
}

#[test]
fn a_name_that_is_taken_and_empty_fields_are_refused_and_count() {
    let desk = Desk::new();
    let server = Server::start(&desk, &[]);
    for (form, status, remaining) in [
        ("user=ada&password=secret", 409, 4),
        ("user=&password=secret", 422, 3),
        ("user=bob&password=", 422, 2),
    ] {
        let answer = server.client().post("/register", form);
        assert_counted(&answer, status, [5, remaining], 3_600);
    }
}

#[test]
fn forms_that_lack_a_field_are_the_clients_fault_and_count() {
    let desk = Desk::new();
    let server = Server::start(&desk, &[]);
    let forms = [
        "",
        "user=ada",
        "password=guess",
        "user=ada&user=ada&password=x",
        "{}",
    ];
    for (form, remaining) in forms.into_iter().zip((0..5).rev()) {
        let answer = server.client().post("/login", form);
        assert!((400..500).contains(&answer.status), "{form}: {answer:?}");
        assert_eq!(answer.number("x-ratelimit-remaining"), remaining, "{form}");
    }
    assert_refused(&server.client());
}

#[test]
fn odd_bytes_are_a_wrong_password_or_a_bad_form() {
    let desk = Desk::new();
    let server = Server::start(&desk, &["--quota", "100/hour"]);
    let long = [b"user=ada&password=", &[b'x'; 1 << 20][..]].concat();
    let forms: [&[u8]; 8] = [
        b"user=%00%ff&password=%0d%0a",
        b"user=\xff\xfe&password=\0\x1b[2J",
        b"user=%F0%9F%94%91&password=%zz%",
        b"user=ada&password=correct%00horse",
        b"user=ADA&password=correct+horse",
        b"=&&==;",
        &[0xff; 1000],
        &long,
    ];
    for form in forms {
        let answer = server.client().post("/login", form.to_vec());
        assert!(matches!(answer.status, 401 | 422), "{answer:?}");
    }
    let answer = server.client().post("/login", RIGHT);
    assert_counted(&answer, 200, [100, 91], 3_600);
    assert_eq!(server.stop("TERM"), "", "it has nothing to say about them");
}

#[test]
fn of_a_hundred_logins_at_once_exactly_five_are_answered() {
    let desk = Desk::new();
    let server = Server::start(&desk, &["--quota", "5/hour"]);
    let client = server.client();
    let answers = runtime().block_on(async {
        let asked = |_| {
            let client = client.clone();
            tokio::spawn(async move { client.ask(Method::POST, "/login", WRONG).await })
        };
        let mut answers = Vec::new();
        for asked in (0..100).map(asked).collect::<Vec<_>>() {
            answers.push(asked.await.unwrap());
        }
        answers
    });
    let mut left = Vec::new();
    for answer in &answers {
        match answer.status {
            401 => left.push(answer.number("x-ratelimit-remaining")),
            _ => assert_sent_away(answer, 5, 3_600),
        }
    }
    left.sort_unstable();
    assert_eq!(left, [0, 1, 2, 3, 4]);
}

// The page

#[test]
fn the_page_says_how_many_attempts_are_left_and_counts_nothing() {
    let desk = Desk::new();
    let server = Server::start(&desk, &[]);
    let client = server.client();
    for _ in 0..10 {
        assert_eq!(left_on_page(&client.get("/")), [5, 5, 0]);
    }
    assert_admitted(&client, 4);
    assert_admitted(&client, 3);
    let [limit, remaining, reset] = left_on_page(&client.get("/"));
    assert_eq!([limit, remaining], [5, 3]);
    assert!((1..=60_000).contains(&reset), "{reset}");
    refused(&client);
    let [limit, remaining, reset] = left_on_page(&client.get("/"));
    assert_eq!([limit, remaining], [5, 0]);
    assert!((1..=60_000).contains(&reset), "{reset}");
}

/// The limit, what remains of it and the ms to the reset, as the page has them.
#[track_caller]
fn left_on_page(answer: &Answer) -> [u64; 3] {
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(
        answer.field("content-type"),
        Some("text/html; charset=utf-8")
    );
    assert_eq!(answer.field("x-ratelimit-limit"), None);
    ["limit", "remaining", "reset-ms"].map(|name| {
        let (_, rest) = answer.body.split_once(&format!(" data-{name}=\"")).unwrap();
        rest.split_once('"').unwrap().0.parse().unwrap()
    })
}

#[test]
fn nothing_of_the_page_but_its_three_numbers_is_filled_in() {
    let desk = Desk::new();
    let server = Server::start(&desk, &[]);
    let page = server.client().get("/").body;
    let (_, script) = page.split_once("<script>").unwrap();
    let (_, original) = include_str!("../../examples/login.html")
        .split_once("<script>")
        .unwrap();
    assert_eq!(script, original);
}

// Who is counted

#[test]
fn without_a_trusted_proxy_no_header_makes_a_new_client() {
    let desk = Desk::new();
    let server = Server::start(&desk, &[]);
    for remaining in (0..5_u64).rev() {
        let spoofed = format!("198.51.100.{remaining}");
        let client = server.client().forwarded(&[&spoofed]);
        assert_admitted(&client, remaining);
    }
    for lines in [
        &["198.51.100.66"][..],
        &["198.51.100.67", "2001:db8::67"],
        &["127.0.0.1, 198.51.100.68"],
        &["unknown"],
        &[""],
    ] {
        assert_refused(&server.client().forwarded(lines));
    }
    let logged = server.stop("TERM");
    assert_eq!(logged.lines().count(), 1, "said once: {logged}");
    assert!(logged.contains("no proxy is trusted"), "{logged}");
}

#[test]
fn behind_a_trusted_proxy_the_address_that_it_added_is_counted() {
    let desk = Desk::new();
    let server = Server::start(&desk, &["--trusted-proxy", "127.0.0.0/8"]);
    let client = |line: &str| server.client().forwarded(&[line]);
    refused(&client("192.0.2.1"));
    assert_refused(&client("198.51.100.66, 192.0.2.1"));
    assert_refused(&client("127.0.0.1,192.0.2.1"));
    assert_refused(&server.client().forwarded(&["198.51.100.66", "192.0.2.1"]));
    assert_admitted(&client("192.0.2.2"), 4);
    // The proxy itself is a client as well.
    assert_admitted(&server.client(), 4);
    assert_eq!(server.stop("TERM"), "");
}

#[test]
fn several_proxies_may_be_trusted() {
    let options = [
        "--trusted-proxy",
        "127.0.0.1",
        "--trusted-proxy",
        "10.0.0.0/8",
    ];
    let desk = Desk::new();
    let server = Server::start(&desk, &options);
    let client = |line: &str| server.client().forwarded(&[line]);
    refused(&client("192.0.2.1"));
    assert_refused(&client("192.0.2.1, 10.1.2.3"));
    assert_admitted(&client("192.0.2.1, 11.1.2.3"), 4);
}

#[cfg(target_os = "linux")]
#[test]
fn every_address_is_a_client_of_its_own() {
    let desk = Desk::new();
    let server = Server::start(&desk, &[]);
    refused(&server.client().at(2));
    assert_admitted(&server.client().at(3), 4);
    assert_refused(&server.client().at(2));
    let page = server.client().at(3).get("/");
    assert_eq!(left_on_page(&page)[1], 4);
}

// Across restarts

#[test]
fn a_client_stays_refused_across_kill_9() {
    let desk = Desk::new();
    let server = Server::start(&desk, &[]);
    let before = refused(&server.client());
    server.kill();
    let server = Server::start(&desk, &[]);
    let after = server.client().post("/login", WRONG);
    assert_sent_away(&after, 5, 60);
    let reset = |answer: &Answer| answer.number("x-ratelimit-reset");
    assert!(reset(&after) >= reset(&before), "{before:?} {after:?}");
}

#[test]
fn after_kill_9_as_many_logins_are_left_as_before() {
    let desk = Desk::new();
    for remaining in (0..5).rev() {
        let server = Server::start(&desk, &[]);
        assert_admitted(&server.client(), remaining);
        server.kill();
    }
    assert_refused(&Server::start(&desk, &[]).client());
}

#[test]
fn a_client_that_waits_as_long_as_told_is_served() {
    let desk = Desk::new();
    let server = Server::start(&desk, &["--quota", "2/2s"]);
    wait_as_told(&refused(&server.client()));
    assert_eq!(server.client().post("/login", RIGHT).status, 200);
}

#[test]
fn a_window_goes_on_while_the_server_is_dead() {
    let desk = Desk::new();
    let options = ["--quota", "2/2s"];
    let server = Server::start(&desk, &options);
    let refusal = refused(&server.client());
    server.kill();
    wait_as_told(&refusal);
    let server = Server::start(&desk, &options);
    assert_eq!(server.client().post("/login", RIGHT).status, 200);
}

/// Real time has to pass: a window of two seconds, by the server's own clock.
fn wait_as_told(refusal: &Answer) {
    let seconds = refusal.number("retry-after");
    assert!((1..=2).contains(&seconds), "{refusal:?}");
    thread::sleep(Duration::from_secs(seconds));
}

#[test]
fn either_signal_ends_it_with_0_and_a_file_that_is_closed_cleanly() {
    let desk = Desk::new();
    for (signal, remaining) in [("TERM", 4), ("INT", 3), ("TERM", 2)] {
        let server = Server::start(&desk, &[]);
        assert_admitted(&server.client(), remaining);
        assert_eq!(server.stop(signal), "");
        // Else it would ask for --repair.
        let dump = desk.dump(&["--db", DB, "--json"]).printed(0);
        assert!(dump.contains("\"client\":\"127.0.0.1\""), "{dump}");
    }
    assert_eq!(desk.names(), [DB.into()].into());
}

#[test]
fn connections_without_a_request_do_not_hold_up_its_end() {
    let desk = Desk::new();
    let server = Server::start(&desk, &[]);
    let _unused = TcpStream::connect(server.address).unwrap();
    let mut kept = TcpStream::connect(server.address).unwrap();
    kept.write_all(b"GET / HTTP/1.1\r\nhost: login\r\n\r\n")
        .unwrap();
    // Once it has begun to answer, the request is complete.
    kept.read_exact(&mut [0]).unwrap();
    server.stop("TERM");
    desk.dump(&["--db", DB]).printed(0);
}

#[test]
fn requests_that_never_end_do_not_hold_up_its_end() {
    let desk = Desk::new();
    let mut server = Server::start(&desk, &[]);
    let half = "POST /login HTTP/1.1\r\nhost: login\r\nexpect: 100-continue\r\n\
                content-type: application/x-www-form-urlencoded\r\ncontent-length: 30\r\n\r\n";
    let mut slow = TcpStream::connect(server.address).unwrap();
    slow.write_all(half.as_bytes()).unwrap();
    // It asks for the body once it has the head.
    slow.read_exact(&mut [0]).unwrap();
    server.signal("TERM");
    server.signal("INT");
    let ended = server.end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    desk.dump(&["--db", DB]).printed(0);
}

// Errors

/// Runs a login server that cannot start.
fn failing(desk: &Desk, options: &[&str]) -> Ended {
    let mut command = desk.command("login", &[&["--port", "0"], options].concat());
    let ended = Ended::from(command.output().unwrap());
    assert_eq!(ended.out, "", "{ended:?}");
    ended
}

#[test]
fn a_bad_option_is_a_usage_error_that_names_the_value() {
    let desk = Desk::new();
    for (options, named) in [
        (&["--quota", "5"][..], "invalid quota \"5\": "),
        (&["--quota", "0/minute"], "invalid quota \"0/minute\": "),
        (&["--quota", "5/m"], "invalid quota \"5/m\": "),
        (&["--quota", "100001/minute"], "\"100001\" is larger than"),
        (&["--trusted-proxy", "proxy.example"], "\"proxy.example\""),
        (&["--trusted-proxy", "0.0.0.0/0"], "\"0.0.0.0/0\""),
        (&["--trusted-proxy", "::/0"], "\"::/0\""),
        (&["--trusted-proxy", "10.0.0.1/8"], "\"10.0.0.1/8\""),
        (
            &["--trusted-proxy", "10.0.0.1", "--trusted-proxy", ""],
            "\"\"",
        ),
        (&["--db"], "--db"),
        (&["--nonsense"], "--nonsense"),
        (&["one too many"], "one too many"),
    ] {
        let ended = failing(&desk, options);
        assert_eq!(ended.code, Some(2), "{ended:?}");
        assert!(ended.err.starts_with("error: "), "{ended:?}");
        assert!(ended.err.contains(named), "{options:?}: {ended:?}");
    }
    assert!(desk.names().is_empty(), "a usage error makes no file");
}

#[test]
fn a_port_is_a_number_below_65536() {
    let desk = Desk::new();
    let mut command = desk.command("login", &["--port", "65536"]);
    let ended = Ended::from(command.output().unwrap());
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.err.contains("65536"), "{ended:?}");
}

#[test]
fn a_port_in_use_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let desk = Desk::new();
    let mut command = desk.command("login", &["--port", &port, "--db", DB]);
    let line = Ended::from(command.output().unwrap()).failed("login");
    assert!(line.contains(&format!("port {port}: ")), "{line}");
}

#[test]
fn a_missing_directory_is_named() {
    let desk = Desk::new();
    let line = failing(&desk, &["--db", "missing/limits.redb"]).failed("login");
    assert!(
        line.contains(&format!("{:?}", desk.path("missing"))),
        "{line}"
    );
    assert!(desk.names().is_empty());
}

/// Takes as long as the library waits for a lock by default, 5 s.
#[test]
fn a_second_server_on_the_same_file_is_told_so() {
    let desk = Desk::new();
    let server = Server::start(&desk, &[]);
    let started = Instant::now();
    let line = failing(&desk, &["--db", DB]).failed("login");
    assert!(started.elapsed() >= Duration::from_secs(5), "it waits");
    assert!(line.contains(&format!("{:?}", desk.path(DB))), "{line}");
    assert!(line.contains("open in another process"), "{line}");
    // The first goes on.
    assert_admitted(&server.client(), 4);
}

#[test]
fn a_server_that_waits_for_the_file_takes_over() {
    let desk = Desk::new();
    let server = Server::start(&desk, &[]);
    refused(&server.client());
    thread::scope(|scope| {
        let next = scope.spawn(|| Server::start(&desk, &[]));
        server.stop("TERM");
        assert_refused(&next.join().unwrap().client());
    });
}

#[test]
fn without_db_the_environment_says_which_file() {
    let desk = Desk::new();
    let mut command = desk.command("login", &["--port", "0"]);
    command.env("RATEVAULT_DB", "missing/env.redb");
    let line = Ended::from(command.output().unwrap()).failed("login");
    assert!(line.contains("env.redb"), "{line}");
}

#[test]
fn help_names_every_option_and_the_password() {
    let desk = Desk::new();
    let mut command = desk.command("login", &["--help"]);
    let help = Ended::from(command.output().unwrap()).printed(0);
    let options = "--port --db --trusted-proxy --quota RATEVAULT_DB ada";
    for named in options.split(' ').chain(["correct horse", "5/minute"]) {
        assert!(help.contains(named), "{named}: {help}");
    }
}

#[test]
fn what_is_no_attempt_is_not_counted() {
    let desk = Desk::new();
    let server = Server::start(&desk, &[]);
    assert_eq!(server.client().get("/login").status, 405);
    assert_eq!(server.client().get("/nothing").status, 404);
    let answer = server.client().post("/login", "user=ada&password=guess");
    assert_eq!(answer.number("x-ratelimit-remaining"), 4);
}
