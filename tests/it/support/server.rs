//! The example `login` as a process that serves.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command};

use super::client::{Answer, Client};
use super::desk::{Desk, Ended};

pub const DB: &str = "limits.redb";

/// A program that runs until this is dropped.
pub struct Running(Option<Child>);

impl Running {
    pub fn start(command: &mut Command) -> Self {
        Self(Some(command.spawn().unwrap()))
    }

    pub fn child(&mut self) -> &mut Child {
        self.0.as_mut().unwrap()
    }

    /// What follows `before` in its first line of output that starts so. `None`: it ended.
    pub fn line_after(&mut self, before: &str) -> Option<String> {
        let output = self.child().stdout.as_mut().unwrap();
        let mut lines = BufReader::new(output).lines().map(Result::unwrap);
        lines.find_map(|line| line.strip_prefix(before).map(str::to_owned))
    }

    /// Sends it a signal by name.
    pub fn signal(&mut self, name: &str) {
        let id = self.child().id().to_string();
        let script = ["-c", "kill -s \"$0\" \"$1\"", name, &id];
        assert!(Command::new("sh").args(script).status().unwrap().success());
    }

    pub fn end(mut self) -> Ended {
        let child = self.0.take().unwrap();
        child.wait_with_output().unwrap().into()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A login server on a port of its own.
pub struct Server {
    running: Running,
    pub address: SocketAddr,
}

impl Server {
    /// Starts on the desk's own file.
    #[track_caller]
    pub fn start(desk: &Desk, options: &[&str]) -> Self {
        let needed = ["--port", "0", "--db", DB];
        let mut command = desk.command("login", &[&needed[..], options].concat());
        let mut running = Running::start(&mut command);
        match running.line_after("listening on http://") {
            Some(address) => Self {
                address: address.parse().unwrap(),
                running,
            },
            None => panic!("{:?}", running.end()),
        }
    }

    pub fn client(&self) -> Client {
        Client::new(self.address)
    }

    /// `kill -9`.
    pub fn kill(mut self) {
        self.running.child().kill().unwrap();
        let ended = self.running.end();
        assert_eq!(ended.code, None, "{ended:?}");
    }

    pub fn signal(&mut self, name: &str) {
        self.running.signal(name);
    }

    pub fn end(self) -> Ended {
        self.running.end()
    }

    /// Ends it, which has to go well; what it logged.
    #[track_caller]
    pub fn stop(mut self, signal: &str) -> String {
        self.signal(signal);
        let ended = self.end();
        assert_eq!(ended.code, Some(0), "{ended:?}");
        ended.err
    }
}

pub const WRONG: &str = "user=ada&password=guess";
pub const RIGHT: &str = "user=ada&password=correct+horse";

/// Tries to log in with a wrong password until that is refused.
#[track_caller]
pub fn refused(client: &Client) -> Answer {
    let mut answers = (0..100).map(|_| client.post("/login", WRONG));
    answers.find(|answer| answer.status == 429).unwrap()
}

/// The next login is admitted and leaves `remaining`.
#[track_caller]
pub fn assert_admitted(client: &Client, remaining: u64) {
    let answer = client.post("/login", WRONG);
    assert_eq!(answer.status, 401, "{answer:?}");
    assert_eq!(answer.number("x-ratelimit-remaining"), remaining);
}

/// The next login is refused.
#[track_caller]
pub fn assert_refused(client: &Client) {
    let answer = client.post("/login", RIGHT);
    assert_eq!(answer.status, 429, "{answer:?}");
}
