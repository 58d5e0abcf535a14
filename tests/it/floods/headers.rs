//! Headers of 400 KB, as long as hyper takes them, over a real socket.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use axum::Router;
use axum::routing::get;
use http::request::Parts;
use http::{Method, StatusCode};
use ratevault::http::{
    ClientKey, KeyFunction, RateLimitLayer, TrustedProxies, ip_key, ip_key_forwarded,
};

use super::{Cost, flood, is_flooded, latencies, peak_memory, say};
use crate::support::manual_clock;
use crate::support::web::{
    Connection, LOCALHOST, Limited, field, limiter, listener, request, serve,
};

const LENGTH: usize = 400_000;

/// `piece` again and again, and then `end`, `LENGTH` bytes at most.
fn long(piece: &str, end: &str) -> String {
    let times = (LENGTH - end.len()) / piece.len();
    format!("{}{end}", piece.repeat(times))
}

/// A page that is limited by a key, served until the test's runtime ends.
async fn page(limiter: &Limited, key: impl KeyFunction + 'static) -> SocketAddr {
    let limit = RateLimitLayer::new(limiter.clone(), "login").key(key);
    let page = Router::new().route("/", get(async || "served").layer(limit));
    serve(page, listener(LOCALHOST).await)
}

fn behind_a_proxy() -> impl KeyFunction {
    ip_key_forwarded(TrustedProxies::new(["127.0.0.1", "10.0.0.0/8"]).unwrap())
}

fn by_token(request: &Parts) -> Option<ClientKey> {
    request.headers.get("x-token").map(ClientKey::from)
}

/// How many places are left to whoever sends this field; `None`: it was refused.
async fn left_to(server: SocketAddr, name: &str, value: &str) -> Option<u32> {
    let mut client: Connection = Connection::to(server).await;
    let answer = client.send(request(Method::GET, &[(name, value)])).await;
    match answer.status() {
        StatusCode::OK => Some(
            field(answer.headers(), "x-ratelimit-remaining")
                .parse()
                .unwrap(),
        ),
        StatusCode::TOO_MANY_REQUESTS => None,
        other => panic!("{name}: {other}"),
    }
}

/// As [`left_to`], for one after the other.
async fn left_to_each(server: SocketAddr, name: &str, values: &[String]) -> Vec<Option<u32>> {
    let mut left = Vec::new();
    for value in values {
        left.push(left_to(server, name, value).await);
    }
    left
}

const HOP: &str = "10.0.0.7, ";

#[tokio::test]
async fn an_x_forwarded_for_of_400_kb_is_walked_like_any_other() {
    let server = page(&limiter(2, &manual_clock()), behind_a_proxy()).await;
    let name = "x-forwarded-for";
    // Whoever wrote the hops before: the first that is not trusted, from the right, is the client.
    let values = [
        long("x", &format!(", 198.51.100.9, {HOP}10.0.0.8")),
        long("198.51.100.1, ", "198.51.100.9"),
        format!("198.51.100.9, {}", long(HOP, "10.0.0.8")),
        "198.51.100.9".to_owned(),
    ];
    let left = left_to_each(server, name, &values).await;
    assert_eq!(left, [Some(1), Some(0), None, None]);
    // What is no address stops the walk at the last trusted hop: here the peer, whatever is written.
    let garbage = [
        long("x", "1"),
        long(",", ""),
        long(HOP, "x"),
        "unreadable".to_owned(),
    ];
    let left = left_to_each(server, name, &garbage).await;
    assert_eq!(left, [Some(1), Some(0), None, None]);
}

#[tokio::test]
async fn a_header_of_400_kb_that_nobody_asked_for_makes_no_new_client() {
    let hops = long("198.51.100.9, ", "198.51.100.10");
    let forwarded = long("for=198.51.100.9, ", "for=198.51.100.10");
    for (name, value) in [("x-forwarded-for", hops), ("forwarded", forwarded.clone())] {
        let server = page(&limiter(2, &manual_clock()), ip_key()).await;
        let values = [value.clone(), format!("{value}1"), value[1..].to_owned()];
        let left = left_to_each(server, name, &values).await;
        assert_eq!(left, [Some(1), Some(0), None], "{name}");
    }
    let server = page(&limiter(1, &manual_clock()), behind_a_proxy()).await;
    let values = [forwarded.clone(), forwarded + "1"];
    let left = left_to_each(server, "forwarded", &values).await;
    assert_eq!(left, [Some(0), None]);
}

#[tokio::test]
async fn keys_of_400_kb_that_differ_in_one_byte_are_two_clients_and_take_the_room_of_a_digest() {
    let limiter = limiter(2, &manual_clock());
    let server = page(&limiter, by_token).await;
    let values = ["1", "2", "1", "1", "2", "2"].map(|end| long("x", end));
    let left = left_to_each(server, "x-token", &values).await;
    assert_eq!(left, [Some(1), Some(1), Some(0), None, Some(0), None]);
    let rows = limiter.vault().scan().map(|row| row.unwrap().key);
    let clients: BTreeSet<_> = rows.map(|key| key.client().to_string()).collect();
    assert_eq!(clients.len(), 2);
    let is_digest = |client: &String| client.starts_with("sha256:") && client.len() == 71;
    assert!(clients.iter().all(is_digest), "{clients:?}");
}

/// How many requests come with a header of each kind.
const REQUESTS: u32 = 200;

/// How much memory a process may hold that serves them, and asks, one after the other.
const MEMORY: u64 = 64 << 20;

#[test]
#[ignore = "a process of other tests"]
fn long_headers_come() {
    if !is_flooded() {
        return;
    }
    let runtime = crate::support::client::runtime();
    let took = runtime.block_on(async {
        let limiter = limiter(u32::from(u16::MAX), &manual_clock());
        let (proxied, keyed) = (
            page(&limiter, behind_a_proxy()).await,
            page(&limiter, by_token).await,
        );
        let mut took: Vec<Duration> = Vec::new();
        for number in 0..REQUESTS {
            let last = format!("10.0.{}.{}", number / 250, number % 250);
            for (server, name, value) in [
                (proxied, "x-forwarded-for", long(HOP, &last)),
                (proxied, "forwarded", long("for=10.0.0.7, ", &last)),
                (keyed, "x-token", long("x", &last)),
            ] {
                let begun = Instant::now();
                left_to(server, name, &value).await.unwrap();
                took.push(begun.elapsed());
            }
        }
        took
    });
    let memory = peak_memory();
    Cost { memory, file: 0 }.say();
    say(latencies(took));
}

#[test]
#[ignore = "takes some seconds"]
fn headers_of_400_kb_cost_bounded_memory() {
    let said = flood("headers::long_headers_come");
    let cost = Cost::heard(&said[0]);
    let megabytes = cost.memory as f64 / 1e6;
    println!(
        "{REQUESTS} requests of each kind: memory {megabytes:.0} MB; {}",
        said[1]
    );
    assert!(cost.memory <= MEMORY, "{megabytes} MB");
}
