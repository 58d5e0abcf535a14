//! Whose bucket a request falls into: its peer's, or that of the client behind trusted proxies.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};

use axum::Router;
use axum::extract::ConnectInfo;
use axum::routing::get;
use http::request::Parts;
use http::{Extensions, HeaderValue, Request};
use proptest::prelude::*;
use ratevault::http::{
    self as limit, ClientKey, IpKey, KeyFunction, Peer, RateLimitLayer, TrustedProxies, ip_key,
    ip_key_forwarded,
};
use serde::Deserialize;

use crate::support::manual_clock;
use crate::support::web::{Connection, LOCALHOST, Limited, NEIGHBOUR, limiter, listener, serve};

const PROXY: &str = "10.0.0.1";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Vector {
    name: String,
    #[serde(rename = "group")]
    _group: String,
    peer: IpAddr,
    trusted: Vec<String>,
    xff: Vec<String>,
    expect: IpAddr,
    #[serde(rename = "why")]
    _why: String,
    #[serde(rename = "policy")]
    _policy: Option<String>,
}

#[test]
fn client_ip_vectors() {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/client_ip.json");
    let mut files = vec![own];
    if let Some(folder) = std::env::var_os("RATEVAULT_VECTORS") {
        files.push(PathBuf::from(folder).join("client_ip.json"));
    }
    for file in files {
        let text = fs::read_to_string(&file).unwrap_or_else(|error| panic!("{file:?}: {error}"));
        let vectors: Vec<Vector> = serde_json::from_str(&text).unwrap();
        assert!(!vectors.is_empty());
        vectors.iter().for_each(Vector::check);
        println!("client_ip: {}", vectors.len());
    }
}

impl Vector {
    fn check(&self) {
        let key = behind(&self.trusted);
        let lines = self.xff.iter().map(|line| latin_1(line));
        let found = key.address(&asked(self.peer, lines));
        assert_eq!(found, Some(self.expect), "{}", self.name);
    }
}

/// One byte for each character.
fn latin_1(line: &str) -> Vec<u8> {
    let byte = |char| u8::try_from(char).unwrap_or_else(|_| panic!("{line:?} is not Latin-1"));
    line.chars().map(byte).collect()
}

fn behind(trusted: &[impl AsRef<str>]) -> IpKey {
    ip_key_forwarded(TrustedProxies::new(trusted).unwrap())
}

/// A request from `peer` with these lines of `X-Forwarded-For`, in this order.
fn asked<L: AsRef<[u8]>>(peer: IpAddr, lines: impl IntoIterator<Item = L>) -> Parts {
    let mut request = nobodys();
    request.extensions.insert(Peer(peer));
    for line in lines {
        let line = HeaderValue::from_bytes(line.as_ref()).unwrap();
        request.headers.append("x-forwarded-for", line);
    }
    request
}

/// A request of which nobody said where it came from.
fn nobodys() -> Parts {
    Request::new(()).into_parts().0
}

fn from(peer: &str) -> Parts {
    asked::<&str>(ip(peer), [])
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// A page that is limited by address.
fn page(limiter: &Limited, key: IpKey) -> Router {
    let limit = RateLimitLayer::new(limiter.clone(), "login").key(key);
    Router::new().route("/", get(async || "served").layer(limit))
}

async fn is_served(limiter: &Limited, key: &IpKey, request: &Parts) -> bool {
    let answer = limit::check(request, limiter, "login", key.clone()).await;
    answer.is_ok()
}

fn remaining(limiter: &Limited, address: IpAddr) -> u32 {
    limiter.peek("login", address).unwrap().remaining()
}

#[tokio::test]
async fn whoever_forges_the_header_gets_no_new_bucket() {
    // Also where somebody else's header would be believed.
    for key in [ip_key(), behind(&["10.0.0.0/8"])] {
        let limiter = limiter(5, &manual_clock());
        let server = serve(page(&limiter, key), listener(LOCALHOST).await);
        let mut served = 0;
        for number in 0..20 {
            // Of a user, and of a proxy that is trusted.
            let forged = format!("198.51.100.{number}, 10.0.0.{number}");
            let answer = Connection::to(server).await.get_forwarded(&forged).await;
            served += u32::from(answer.status().is_success());
        }
        assert_eq!(served, 5);
        assert_eq!(remaining(&limiter, LOCALHOST), 0);
    }
}

#[tokio::test]
async fn ipv4_clients_of_a_dual_stack_listener_are_told_apart() {
    let limiter = limiter(5, &manual_clock());
    let dual = serve(
        page(&limiter, ip_key()),
        listener(Ipv6Addr::UNSPECIFIED).await,
    );
    let v6 = IpAddr::V6(Ipv6Addr::LOCALHOST);
    for client in [LOCALHOST, NEIGHBOUR, v6] {
        let address = SocketAddr::new(if client.is_ipv6() { v6 } else { LOCALHOST }, dual.port());
        let mut connection: Connection = Connection::from(client, address).await;
        assert_eq!(connection.served_of(7).await, 5, "{client}");
    }

    let plain = serve(page(&limiter, ip_key()), listener(LOCALHOST).await);
    let mut known: Connection = Connection::from(LOCALHOST, plain).await;
    assert_eq!(known.served_of(1).await, 0);
    let third = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 3));
    let mut unknown: Connection = Connection::from(third, plain).await;
    assert_eq!(unknown.served_of(1).await, 1);
}

/// Addresses that differ in any of the last 64 bits.
fn of_one_network() -> impl Iterator<Item = IpAddr> {
    let network = 0x2001_0db8_0001_0002_u128 << 64;
    (0..1_000_u64).map(move |number| {
        // An odd factor: no two numbers give the same bits.
        let host = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Ipv6Addr::from_bits(network | u128::from(host)).into()
    })
}

#[tokio::test]
async fn a_thousand_addresses_of_one_64_share_a_bucket() {
    let limiter = limiter(1_000, &manual_clock());
    for address in of_one_network() {
        let request = asked::<&str>(address, []);
        assert!(is_served(&limiter, &ip_key(), &request).await, "{address}");
    }
    let last = from("2001:db8:1:2:ffff:ffff:ffff:ffff");
    assert!(!is_served(&limiter, &ip_key(), &last).await);
    assert_eq!(remaining(&limiter, ip("2001:db8:1:2::")), 0);
    let next_network = from("2001:db8:1:3::");
    assert!(is_served(&limiter, &ip_key(), &next_network).await);
}

#[tokio::test]
async fn a_thousand_addresses_of_one_64_share_a_bucket_behind_a_proxy_too() {
    let limiter = limiter(1_000, &manual_clock());
    let key = behind(&[PROXY]);
    let forwarded = |client: IpAddr| asked(ip(PROXY), [client.to_string()]);
    for address in of_one_network() {
        let request = forwarded(address);
        assert!(is_served(&limiter, &key, &request).await, "{address}");
    }
    let last = forwarded(ip("2001:db8:1:2:ffff:ffff:ffff:ffff"));
    assert!(!is_served(&limiter, &key, &last).await);
    let next_network = forwarded(ip("2001:db8:1:3::"));
    assert!(is_served(&limiter, &key, &next_network).await);
    assert_eq!(remaining(&limiter, ip(PROXY)), 1_000);
}

#[test]
fn the_prefix_says_how_much_of_an_ipv6_address_is_one_client() {
    fn are_one(bits: Option<u8>, addresses: [&str; 2]) -> bool {
        let key = bits.map_or(Ok(ip_key()), |bits| ip_key().ipv6_prefix(bits));
        let [left, right] = addresses.map(|address| key.as_ref().unwrap().client(&from(address)));
        left.unwrap() == right.unwrap()
    }
    let one_64 = ["2001:db8:1:2::1", "2001:db8:1:2:8000::"];
    let one_56 = ["2001:db8:1:200::1", "2001:db8:1:2ff::1"];
    let two_56 = ["2001:db8:1:200::1", "2001:db8:1:300::1"];
    assert!(are_one(None, one_64) && !are_one(None, one_56));
    assert!(are_one(Some(64), one_64) && !are_one(Some(64), one_56));
    assert!(are_one(Some(56), one_56) && !are_one(Some(56), two_56));
    assert!(!are_one(Some(128), one_64));
    assert!(are_one(Some(1), ["::", "7fff::"]) && !are_one(Some(1), ["::", "8000::"]));
    // IPv4 addresses are counted whole.
    assert!(!are_one(Some(1), ["203.0.113.6", "203.0.113.7"]));
}

#[test]
fn a_prefix_that_no_address_has_is_an_error_that_names_it() {
    for bits in [0, 129, 255] {
        let error = ip_key().ipv6_prefix(bits).unwrap_err().to_string();
        assert!(error.contains(&bits.to_string()), "{error}");
    }
}

#[test]
fn a_mapped_ipv4_address_is_the_ipv4_client() {
    let v4 = Some(ClientKey::from(ip("203.0.113.7")));
    // Cut to any prefix first, all of IPv4 would be one client.
    for bits in [1, 64, 96, 128] {
        let key = ip_key().ipv6_prefix(bits).unwrap();
        assert_eq!(key.client(&from("::ffff:203.0.113.7")), v4, "{bits}");
        let key = behind(&[PROXY]).ipv6_prefix(bits).unwrap();
        let forwarded = asked(ip("::ffff:10.0.0.1"), ["::ffff:cb00:7107"]);
        assert_eq!(key.client(&forwarded), v4, "{bits}");
    }
}

#[derive(Clone)]
struct OwnServers(IpAddr);

fn by_own_server(extensions: &Extensions) -> Option<IpAddr> {
    extensions.get::<OwnServers>().map(|own| own.0)
}

/// A request about which three say that it came from 192.0.2.1, .2 and .3.
fn disputed() -> Parts {
    let mut request = nobodys();
    let socket = SocketAddr::new(ip("192.0.2.1"), 50_000);
    request.extensions.insert(ConnectInfo(socket));
    request.extensions.insert(Peer(ip("192.0.2.2")));
    request.extensions.insert(OwnServers(ip("192.0.2.3")));
    request
}

#[test]
fn a_function_of_ones_own_wins_over_peer_and_peer_over_axums_connect_info() {
    let mut request = disputed();
    let own = ip_key().peer(by_own_server);
    assert_eq!(own.address(&request), Some(ip("192.0.2.3")));
    assert_eq!(ip_key().address(&request), Some(ip("192.0.2.2")));
    request.extensions.remove::<Peer>();
    assert_eq!(ip_key().address(&request), Some(ip("192.0.2.1")));
    request.extensions.remove::<ConnectInfo<SocketAddr>>();
    assert_eq!(ip_key().address(&request), None);
}

#[test]
fn where_a_function_of_ones_own_finds_nobody_no_other_source_is_asked() {
    let mut request = disputed();
    request.extensions.remove::<OwnServers>();
    assert_eq!(ip_key().peer(by_own_server).address(&request), None);
}

#[test]
fn trust_is_in_the_peer_that_the_source_names() {
    let key = behind(&["192.0.2.3"]).peer(by_own_server);
    let mut request = disputed();
    let client = HeaderValue::from_static("203.0.113.7");
    request.headers.append("x-forwarded-for", client);
    assert_eq!(key.address(&request), Some(ip("203.0.113.7")));
    request.extensions.insert(OwnServers(ip("192.0.2.4")));
    assert_eq!(key.address(&request), Some(ip("192.0.2.4")));
}

#[tokio::test]
async fn whoever_has_no_address_shares_one_bucket() {
    let limiter = limiter(5, &manual_clock());
    // Without a peer there is nobody whose word could be taken.
    let mut forwarded = nobodys();
    let field = HeaderValue::from_static("203.0.113.7");
    forwarded.headers.append("x-forwarded-for", field);
    let key = behind(&[PROXY]);
    for _ in 0..2 {
        assert!(is_served(&limiter, &ip_key(), &nobodys()).await);
        assert!(is_served(&limiter, &key, &forwarded).await);
    }
    let shared = limiter.peek("login", "unknown").unwrap();
    assert_eq!(shared.remaining(), 1);
    assert!(is_served(&limiter, &key, &nobodys()).await);
    assert!(!is_served(&limiter, &key, &forwarded).await);
    assert!(!is_served(&limiter, &ip_key(), &nobodys()).await);
}

#[test]
fn what_is_no_proxy_is_an_error_that_names_it() {
    for wrong in ["proxy.example", "10.0.0.0/33", "10.0.0.1/8", "::/0", ""] {
        let proxies = ["10.0.0.0/8", wrong, "192.0.2.1"];
        let error = TrustedProxies::new(proxies).unwrap_err().to_string();
        assert!(error.contains(&format!("{wrong:?}")), "{error}");
        assert!(!error.contains("192.0.2.1"), "{error}");
    }
}

#[test]
fn an_empty_list_trusts_nobody() {
    let nobody = TrustedProxies::new::<[&str; 0]>([]).unwrap();
    assert!(nobody.is_empty());
    assert_eq!(nobody, TrustedProxies::default());
    for peer in ["127.0.0.1", "::1", "10.0.0.1", "0.0.0.0", "::"] {
        assert!(!nobody.contains(ip(peer)));
        let request = asked(ip(peer), ["203.0.113.7"]);
        let found = ip_key_forwarded(nobody.clone()).address(&request);
        assert_eq!(found, Some(ip(peer)));
    }
}

/// All that a header line can be made of, and what would matter if it were believed.
fn written_by_a_client() -> impl Strategy<Value = Vec<u8>> {
    let byte = any::<u8>().prop_filter("no control character", |byte| {
        *byte == b'\t' || (*byte >= b' ' && *byte != 0x7f)
    });
    let texts = [
        "10.0.0.1",
        "10.0.0.2,",
        ", 198.51.100.66",
        "[2001:db8::1]:443",
        "",
    ];
    let texts = prop::sample::select(texts.map(Vec::from).to_vec());
    let part = prop_oneof![prop::collection::vec(byte, 0..30), texts];
    prop::collection::vec(part, 0..4).prop_map(|parts| parts.concat())
}

/// Whom a proxy can have been called by, as it writes it.
fn caller() -> impl Strategy<Value = (IpAddr, String)> {
    prop_oneof![
        any::<Ipv4Addr>().prop_map(|v4| (v4.into(), v4.to_string())),
        // By nginx, of a listener for both.
        any::<Ipv4Addr>().prop_map(|v4| (v4.into(), v4.to_ipv6_mapped().to_string())),
        any::<Ipv6Addr>().prop_map(|v6| (IpAddr::V6(v6).to_canonical(), v6.to_string())),
    ]
}

/// As nginx makes it with `$proxy_add_x_forwarded_for`: one line, the caller last.
fn joined(lines: &[Vec<u8>], caller: &str) -> Vec<Vec<u8>> {
    let mut all = lines.to_vec();
    all.push(caller.into());
    vec![all.join(&b", "[..])]
}

/// As HAProxy makes it with `option forwardfor`: a line of its own, the last.
fn appended(lines: &[Vec<u8>], caller: &str) -> Vec<Vec<u8>> {
    let mut all = lines.to_vec();
    all.push(caller.into());
    all
}

proptest! {
    #[test]
    fn behind_a_proxy_the_client_is_whom_the_proxy_saw_whatever_the_client_writes(
        lines in prop::collection::vec(written_by_a_client(), 0..4),
        (client, written) in caller(),
        add in prop::sample::select(vec![joined as fn(&[Vec<u8>], &str) -> _, appended]),
    ) {
        let trusted = TrustedProxies::new(["10.0.0.0/8"]).unwrap();
        prop_assume!(!trusted.contains(client));
        let request = asked(ip(PROXY), add(&lines, &written));
        prop_assert_eq!(ip_key_forwarded(trusted).address(&request), Some(client));
    }
}

#[test]
fn a_header_of_400_kilobytes_is_walked_to_its_end() {
    let key = behind(&["10.0.0.0/8"]);
    let trusted = "10.1.2.3, ".repeat(40_000);
    let found = |line: String| key.address(&asked(ip(PROXY), [line]));
    let left = format!("203.0.113.7, {trusted}10.0.0.2");
    assert_eq!(found(left), Some(ip("203.0.113.7")));
    assert_eq!(found(trusted.clone()), Some(ip("10.1.2.3")));
    let right = format!("{trusted}203.0.113.7");
    assert_eq!(found(right), Some(ip("203.0.113.7")));
    // One hop of 400 kB, and hops that are nothing.
    assert_eq!(found("1".repeat(400_000)), Some(ip(PROXY)));
    let commas = format!("203.0.113.7{}", ",".repeat(400_000));
    assert_eq!(found(commas), Some(ip("203.0.113.7")));
}

#[test]
fn ten_thousand_header_lines_are_one_list() {
    let key = behind(&["10.0.0.0/8"]);
    let trusted = (0..9_999_u32).map(|number| Ipv4Addr::from_bits(0x0a00_0000 | number));
    let trusted: Vec<_> = trusted.map(|address| address.to_string()).collect();
    let client = || ["203.0.113.7".to_owned()].into_iter();
    let first = asked(ip(PROXY), client().chain(trusted.iter().cloned()));
    assert_eq!(key.address(&first), Some(ip("203.0.113.7")));
    let last = asked(ip(PROXY), trusted.iter().cloned().chain(client()));
    assert_eq!(key.address(&last), Some(ip("203.0.113.7")));
    assert_eq!(
        key.address(&asked(ip(PROXY), &trusted)),
        Some(ip("10.0.0.0"))
    );
}
