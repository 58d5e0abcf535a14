//! Pairs that look alike: whatever endpoint and client are made of, each pair has a count of its own.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

use ratevault::{Client, Decision, Durability, Limiter, Pending, Quota, SlidingWindow, Vault};
use sha2::{Digest, Sha256};

use crate::support::{MINUTE, single_threaded};

const LIMIT: u32 = 3;

/// What stands between the parts of keys elsewhere.
const PIECES: [&str; 4] = ["a", ":", "\0", "\u{1}"];

/// All texts of at most three pieces.
fn texts() -> Vec<String> {
    let mut texts = vec![String::new()];
    let mut last = texts.clone();
    for _ in 0..3 {
        let longer = |text: &String| PIECES.map(|piece| format!("{text}{piece}"));
        last = last.iter().flat_map(longer).collect();
        texts.extend(last.iter().cloned());
    }
    texts
}

/// Clients of 4 KiB that differ in their last byte, in the first after the common prefix that is still
/// stored as it is, or in length; their digests as texts; and whatever a key says of itself.
fn long_and_disguised() -> BTreeSet<Vec<u8>> {
    let mut clients = BTreeSet::new();
    for last in 0..=u8::MAX {
        clients.insert([&vec![b'x'; 4_095][..], &[last]].concat());
    }
    for length in [254, 255, 256, 257, 258, 4_095, 4_097] {
        clients.insert(vec![b'x'; length]);
        clients.insert([&vec![b'x'; length - 1][..], b"y"].concat());
    }
    for long in clients.clone() {
        let digest = Sha256::digest(&long);
        clients.insert(digest.to_vec());
        clients.extend((0..4).map(|tag| [&[tag][..], &digest].concat()));
        let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        clients.insert(format!("sha256:{hex}").into());
        clients.insert(hex.into());
    }
    clients.insert(b"203.0.113.7".to_vec());
    clients.insert(vec![203, 0, 113, 7]);
    clients.insert(Ipv6Addr::LOCALHOST.octets().to_vec());
    clients
}

const ADDRESSES: [IpAddr; 3] = [
    IpAddr::V4(Ipv4Addr::new(203, 0, 113, 7)),
    IpAddr::V6(Ipv6Addr::LOCALHOST),
    IpAddr::V6(Ipv6Addr::new(0xcb00, 0x7107, 0, 0, 0, 0, 0, 0)),
];

/// Checks each pair once, and asserts that each has that many places left.
fn each_has_left(limiter: &Limiter<SlidingWindow>, left: u32) -> u64 {
    let (texts, clients) = (texts(), long_and_disguised());
    let mut checks: Vec<Pending<Decision>> = Vec::new();
    let mut count = 0;
    let mut check = |endpoint: &str, client: Client<'_>| {
        count += 1;
        checks.push(limiter.check_async(endpoint, client));
        // As many as may wait together.
        if checks.len() == 10_000 {
            all_have_left(checks.drain(..), left);
        }
    };
    for endpoint in &texts {
        for client in &texts {
            check(endpoint, client.into());
        }
    }
    for endpoint in ["", "a", "x"] {
        for client in &clients {
            check(endpoint, client.into());
        }
        for address in ADDRESSES {
            check(endpoint, address.into());
        }
    }
    all_have_left(checks.into_iter(), left);
    count
}

fn all_have_left(checks: impl Iterator<Item = Pending<Decision>>, left: u32) {
    let runtime = single_threaded();
    for check in checks {
        assert_eq!(runtime.block_on(check).unwrap().remaining(), left);
    }
}

fn open(path: &Path, durability: Durability) -> Limiter<SlidingWindow> {
    let vault = Vault::builder("pairs").path(path).durability(durability);
    let window = SlidingWindow::new(Quota::per_day(LIMIT).unwrap()).unwrap();
    Limiter::new(vault.open().unwrap(), window)
}

#[test]
fn no_two_pairs_of_endpoint_and_client_ever_share_a_count() {
    let flush_every = MINUTE;
    for durability in [Durability::Committed, Durability::Buffered { flush_every }] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vault.redb");
        let limiter = open(&path, durability);
        for left in (1..LIMIT).rev() {
            each_has_left(&limiter, left);
        }
        limiter.vault().close().unwrap();
        // Nor in the file.
        let limiter = open(&path, durability);
        let pairs = each_has_left(&limiter, 0);
        limiter.vault().flush().unwrap();
        assert_eq!(limiter.vault().len().unwrap(), pairs);
        // Keys of 4 KiB take no more room than short ones.
        limiter.vault().close().unwrap();
        let size = path.metadata().unwrap().len();
        println!("{durability:?}: {pairs} pairs, {:.1} MB", size as f64 / 1e6);
        assert!(size / pairs < 1_000, "{size} bytes for {pairs} pairs");
    }
}
