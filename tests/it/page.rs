//! The login page in a real browser. Run with `--ignored`; needs chromium and chromedriver.

use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use http::Method;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::client::Client;
use crate::support::desk::Desk;
use crate::support::server::{Running, Server};

const PATIENCE: Duration = Duration::from_secs(60);

/// A headless Chromium, driven as W3C's WebDriver says.
struct Browser {
    client: Client,
    session: String,
    _driver: Running,
    profile: TempDir,
}

impl Browser {
    fn start() -> Self {
        // It takes a port that is free for IPv6, and ends if that is not free for IPv4.
        let (driver, port) = (0..20).find_map(|_| try_driver()).unwrap();
        let profile = tempfile::tempdir().unwrap();
        let mut browser = Self {
            client: Client::new(SocketAddr::from(([127, 0, 0, 1], port))),
            session: "/session".into(),
            _driver: driver,
            profile,
        };
        let session = browser.post("", &browser.wanted());
        let id = session["sessionId"].as_str().unwrap();
        browser.session = format!("/session/{id}");
        browser
    }

    fn wanted(&self) -> Value {
        let mut arguments: Vec<_> = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
        ]
        .map(Value::from)
        .into();
        let profile = self.profile.path().display();
        arguments.push(format!("--user-data-dir={profile}").into());
        json!({"capabilities": {"alwaysMatch": {
            "goog:chromeOptions": {"args": arguments},
            "goog:loggingPrefs": {"browser": "ALL"},
        }}})
    }

    #[track_caller]
    fn ask(&self, method: Method, command: &str, body: &Value) -> Value {
        let path = format!("{}{command}", self.session);
        let answer = self.client.wait(method, &path, body.to_string());
        assert_eq!(answer.status, 200, "{command}: {}", answer.body);
        let mut answer: Value = serde_json::from_str(&answer.body).unwrap();
        answer["value"].take()
    }

    #[track_caller]
    fn post(&self, command: &str, body: &Value) -> Value {
        self.ask(Method::POST, command, body)
    }

    fn open(&self, server: &Server) {
        let url = format!("http://{}/", server.address);
        self.post("/url", &json!({"url": url}));
    }

    /// Does something to the one element that a selector finds.
    fn element(&self, selector: &str, action: &str, body: &Value) {
        let wanted = json!({"using": "css selector", "value": selector});
        let found = self.post("/element", &wanted);
        let id = found.as_object().unwrap().values().next().unwrap();
        let command = format!("/element/{}/{action}", id.as_str().unwrap());
        self.post(&command, body);
    }

    fn type_into(&self, name: &str, text: &str) {
        let selector = format!("[name={name}]");
        self.element(&selector, "clear", &json!({}));
        self.element(&selector, "value", &json!({"text": text}));
    }

    fn log_in(&self, password: &str) {
        self.type_into("user", "ada");
        self.type_into("password", password);
        self.element("button", "click", &json!({}));
    }

    /// All that the page shows, at one instant.
    fn shown(&self) -> Shown {
        let script = "const one = selector => document.querySelector(selector);
            return [one('#left').textContent, one('#answer').textContent, one('button').disabled]";
        let shown = self.post("/execute/sync", &json!({"script": script, "args": []}));
        let text = |index: usize| shown[index].as_str().unwrap().to_owned();
        Shown {
            left: text(0),
            answer: text(1),
            disabled: shown[2].as_bool().unwrap(),
        }
    }

    /// What the page shows once that is as it should be.
    fn until(&self, what: &str, holds: impl Fn(&Shown) -> bool) -> Shown {
        let started = Instant::now();
        loop {
            let shown = self.shown();
            if holds(&shown) {
                return shown;
            }
            assert!(started.elapsed() < PATIENCE, "never {what}: {shown:?}");
        }
    }

    /// Waits for an answer that leaves so many of five attempts.
    fn until_left(&self, count: u32) -> Shown {
        let text = format!("{count} of 5 attempts left.");
        self.until(&text, |shown| {
            shown.left.starts_with(&text) && !shown.disabled
        })
    }

    /// Asserts that nothing went wrong on the page, but for the answers that are refusals.
    fn assert_no_errors(&self) {
        let logged = self.post("/se/log", &json!({"type": "browser"}));
        for entry in logged.as_array().unwrap() {
            let message = entry["message"].as_str().unwrap();
            let refusal = message.contains("/login") && entry["source"] == "network";
            assert!(refusal, "{entry}");
        }
    }
}

impl Drop for Browser {
    /// Ends the browser; the driver alone would leave it running.
    fn drop(&mut self) {
        let (client, session) = (self.client.clone(), self.session.clone());
        // A second panic, in a thread of its own, would not hide the first one.
        let ended = thread::spawn(move || client.wait(Method::DELETE, &session, ""));
        let _ = ended.join();
    }
}

fn chromedriver() -> Command {
    let mut command = Command::new("chromedriver");
    let found = command.arg("--version").output();
    assert!(
        found.is_ok(),
        "chromedriver is needed: apt-get install chromium-driver"
    );
    let mut command = Command::new("chromedriver");
    command
        .arg("--port=0")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    command
}

/// A driver that listens, and its port.
fn try_driver() -> Option<(Running, u16)> {
    let mut driver = Running::start(&mut chromedriver());
    let port = driver.line_after("ChromeDriver was started successfully on port ")?;
    Some((driver, port.trim_end_matches('.').parse().unwrap()))
}

#[derive(Debug)]
struct Shown {
    left: String,
    answer: String,
    disabled: bool,
}

impl Shown {
    /// The seconds of "No attempts left: come back at 9:41:00 PM, in 17 seconds."
    fn wait(&self) -> Option<u64> {
        let rest = self.left.strip_prefix("No attempts left: come back at ")?;
        let (clock, wait) = rest.split_once(", in ")?;
        assert!(clock.split(':').count() == 3, "{self:?}");
        let wait = wait
            .strip_suffix(" seconds.")
            .or(wait.strip_suffix(" second."));
        wait?.parse().ok()
    }

    /// Sent away, and kept from trying.
    fn refused(&self) -> bool {
        self.wait().is_some() && self.disabled
    }
}

#[ignore = "needs chromium and chromedriver"]
#[test]
fn the_page_counts_down_to_the_refusal_and_says_when_to_come_back() {
    let desk = Desk::new();
    let server = Server::start(&desk, &["--quota", "5/10 minutes"]);
    let browser = Browser::start();
    browser.open(&server);
    assert_eq!(browser.until_left(5).answer, "");
    for count in (0..5).rev() {
        browser.log_in("guess");
        assert_eq!(browser.until_left(count).answer, "Wrong user or password.");
    }
    browser.log_in("guess");
    let refused = browser.until("a refusal", Shown::refused);
    let text = "Too many requests: try again in ";
    assert!(refused.answer.starts_with(text), "{refused:?}");
    assert!((1..=600).contains(&refused.wait().unwrap()), "{refused:?}");

    browser.post("/refresh", &json!({}));
    let reloaded = browser.until("a refusal after a reload", Shown::refused);
    assert!(reloaded.wait() <= refused.wait(), "{reloaded:?}");
    let later = browser.until("a second less", |shown| shown.wait() < reloaded.wait());
    assert!(later.refused(), "{later:?}");
    browser.assert_no_errors();
}

#[ignore = "needs chromium and chromedriver"]
#[test]
fn once_the_wait_is_over_the_page_lets_the_user_in() {
    let desk = Desk::new();
    let server = Server::start(&desk, &["--quota", "1/4s"]);
    let browser = Browser::start();
    browser.open(&server);
    let mut attempts = 0;
    while !browser.shown().refused() {
        attempts += 1;
        assert!(attempts < 20, "{:?}", browser.shown());
        browser.log_in("guess");
        browser.until("an answer", |shown| !shown.answer.is_empty());
    }
    browser.until("the button works again", |shown| {
        shown.left == "You may try again." && !shown.disabled
    });
    browser.log_in("correct horse");
    browser.until("a welcome", |shown| shown.answer == "Welcome, ada.");
    browser.assert_no_errors();
}
