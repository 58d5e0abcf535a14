//! The login server behind a real nginx. Run with `--ignored`; nginx has to be installed.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process::{Command, Stdio};

use crate::support::client::Client;
use crate::support::desk::Desk;
use crate::support::eventually;
use crate::support::server::{Running, Server, WRONG, assert_admitted, assert_refused, refused};

/// An nginx in front of a server. It is one process, so that nothing outlives it.
struct Nginx {
    address: SocketAddr,
    _running: Running,
}

impl Nginx {
    fn start(desk: &Desk, server: &Server) -> Self {
        let mut attempts = (0..5).filter_map(|_| Self::try_start(desk, server));
        attempts.next().unwrap()
    }

    /// `None`: somebody else took the port that was free.
    fn try_start(desk: &Desk, server: &Server) -> Option<Self> {
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = free.local_addr().unwrap();
        drop(free);
        fs::write(desk.path("nginx.conf"), config(address, server.address)).unwrap();
        let mut running = Running::start(&mut command(desk));
        // It writes this file once it listens.
        let pid = desk.path("nginx.pid");
        eventually("nginx listens or ends", || {
            pid.exists() || running.child().try_wait().unwrap().is_some()
        });
        if pid.exists() {
            let _running = running;
            return Some(Self { address, _running });
        }
        let ended = running.end();
        assert!(ended.err.contains("Address already in use"), "{ended:?}");
        None
    }

    fn client(&self, last: u8) -> Client {
        Client::new(self.address).at(last)
    }
}

fn command(desk: &Desk) -> Command {
    let found = Command::new("nginx").arg("-v").output();
    assert!(
        found.is_ok(),
        "nginx is needed: apt-get install nginx-light"
    );
    let mut command = Command::new("nginx");
    command
        .args(["-e", "stderr", "-c", "nginx.conf", "-p"])
        .arg(desk.0.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn config(address: SocketAddr, server: SocketAddr) -> String {
    format!(
        "daemon off;
master_process off;
pid nginx.pid;
error_log stderr;
events {{ worker_connections 64; }}
http {{
  access_log off;
  client_body_temp_path body;
  proxy_temp_path proxy;
  fastcgi_temp_path fastcgi;
  uwsgi_temp_path uwsgi;
  scgi_temp_path scgi;
  server {{
    listen {address};
    location / {{
      proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
      proxy_pass http://{server};
    }}
  }}
}}
"
    )
}

const TRUSTED: [&str; 2] = ["--trusted-proxy", "127.0.0.1"];

#[ignore = "needs nginx"]
#[test]
fn clients_of_nginx_are_counted_apart() {
    let desk = Desk::new();
    let server = Server::start(&desk, &TRUSTED);
    let nginx = Nginx::start(&desk, &server);
    for remaining in (0..5).rev() {
        assert_admitted(&nginx.client(2), remaining);
    }
    let refusal = nginx.client(2).post("/login", WRONG);
    assert_eq!(refusal.status, 429, "{refusal:?}");
    // The headers get through.
    assert!((1..=60).contains(&refusal.number("retry-after")));
    assert_eq!(refusal.number("x-ratelimit-limit"), 5);
    assert_admitted(&nginx.client(3), 4);
    assert_refused(&nginx.client(2));
    let clients = desk.dump(&["--db", "limits.redb", "--json"]).printed(0);
    for client in ["127.0.0.2", "127.0.0.3"] {
        assert!(
            clients.contains(&format!("\"client\":\"{client}\"")),
            "{clients}"
        );
    }
    assert_eq!(clients.lines().count(), 2, "{clients}");
}

#[ignore = "needs nginx"]
#[test]
fn nothing_that_a_client_writes_makes_it_another_one_to_nginx() {
    let desk = Desk::new();
    let server = Server::start(&desk, &TRUSTED);
    let nginx = Nginx::start(&desk, &server);
    for remaining in (0..5_u64).rev() {
        let spoofed = format!("198.51.100.{remaining}");
        assert_admitted(&nginx.client(2).forwarded(&[&spoofed]), remaining);
    }
    let long = "198.51.100.1, ".repeat(100);
    for lines in [
        &["198.51.100.66"][..],
        &["198.51.100.67", "198.51.100.68"],
        &["198.51.100.69", "127.0.0.1", ""],
        &["127.0.0.1"],
        &["127.0.0.1, 127.0.0.1"],
        &["2001:db8::66, [2001:db8::67]:80"],
        &["127.0.0.3"],
        &["unknown, \"_\", for=198.51.100.70;by=\u{e9}"],
        &[",,, ,"],
        &["198.51.100.71,"],
        &[&long],
    ] {
        assert_refused(&nginx.client(2).forwarded(lines));
    }
    // Nor does it spend what others have.
    assert_admitted(&nginx.client(3), 4);
}

#[ignore = "needs nginx"]
#[test]
fn a_client_on_the_machine_of_nginx_has_a_count_as_well() {
    let desk = Desk::new();
    let server = Server::start(&desk, &TRUSTED);
    let nginx = Nginx::start(&desk, &server);
    for remaining in (0..5).rev() {
        assert_admitted(&nginx.client(1), remaining);
    }
    assert_refused(&nginx.client(1));
    // Past nginx it is the same one.
    assert_refused(&server.client());
    assert_admitted(&nginx.client(2), 4);
}

#[ignore = "needs nginx"]
#[test]
fn a_client_of_nginx_that_is_not_trusted_is_nginx() {
    let desk = Desk::new();
    let server = Server::start(&desk, &["--trusted-proxy", "127.0.0.9"]);
    let nginx = Nginx::start(&desk, &server);
    refused(&nginx.client(2));
    assert_refused(&nginx.client(3));
    assert_refused(&server.client());
}
