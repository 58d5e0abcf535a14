//! What must hold of any bytes of the file's formats: see [`crate::fuzzing`].

use std::fmt::Debug;
use std::net::IpAddr;

use super::key::{Client, ClientBytes, Key, KeyParts, corrupt_row};
use super::table::Stored;
use super::{codec, row};
use crate::clock::Timestamp;
use crate::limiter::{Algorithm, FixedWindow, Quota, Refusals, SlidingWindow};

/// How many bytes of a row come before its value.
const HEADER: usize = 26;

/// The length of a key in one byte, the key, and a row without its checksum: they are a row or none,
/// and whatever value a row holds that is whole, it can be decided on and stored again.
pub fn row(input: &[u8]) {
    let (length, rest) = input.split_first().unwrap_or((&0, &[]));
    let (key, content) = rest.split_at(rest.len().min(usize::from(*length)));
    let _ = (
        Stored::read(key, Some(content)),
        corrupt_row("t", key).to_string(),
    );
    let header = row::guess_header(content);
    let Some((header, value)) = header.zip(content.get(HEADER..)) else {
        return;
    };
    let whole = row::encode(key, header, value);
    assert!(whole.starts_with(content), "a header has one encoding");
    assert_eq!(row::decode(key, &whole), Some((header, value)));
    assert_eq!(
        row::decode(&[key, &[0]].concat(), &whole),
        None,
        "the row of another key"
    );
    let Ok(quota) = Quota::per_minute(3) else {
        unreachable!("it is one")
    };
    decide(&FixedWindow::new(quota), value, header.expires_at);
    for refusals in [Refusals::Count, Refusals::Ignore] {
        let windows = "3/minute; 100000/3650d".parse::<SlidingWindow>();
        let windows = windows.map(|windows| windows.refusals(refusals));
        assert!(windows.is_ok_and(|windows| decide(&windows, value, header.expires_at)));
    }
}

/// Decides on the state that `value` is, if it is one, at instants that are near its times or at an
/// end of time.
fn decide<A: Algorithm>(algorithm: &A, value: &[u8], near: u64) -> bool
where
    A::State: Debug + PartialEq,
{
    let Some(state) = codec::decode::<A::State>(value) else {
        return true;
    };
    let stored_again = |state: &A::State| codec::encode(state).ok();
    let bytes = stored_again(&state);
    assert_eq!(bytes.as_deref().and_then(codec::decode), Some(state));
    for now in [0, near, near.saturating_sub(61_000), u64::MAX] {
        let Some(mut state) = codec::decode::<A::State>(value) else {
            continue;
        };
        let now = Timestamp::from_millis(now);
        for decision in [
            algorithm.peek(&state, now),
            algorithm.decide(&mut state, now, 1).decision,
            algorithm.decide(&mut state, now, 3).decision,
            algorithm.peek(&state, now),
        ] {
            assert!(decision.remaining() < decision.limit() || decision.is_allowed());
            assert_eq!(decision.is_allowed(), decision.retry_after().is_none());
        }
        let bytes = stored_again(&state);
        assert_eq!(bytes.as_deref().and_then(codec::decode), Some(state));
    }
    true
}

/// Any bytes are a key or none; and two pairs of endpoint and client, cut out of the same bytes at the
/// places that the first four bytes say, have one key only if they are one pair.
pub fn key(input: &[u8]) {
    if let Some(key) = Key::decode(input) {
        assert_eq!(key.as_bytes(), input);
        let _ = (key.endpoint(), key.client(), key.to_string());
    }
    let Some(([a, b, c, d], rest)) = input.split_first_chunk() else {
        return;
    };
    let cuts = [[*a, *b], [*c, *d]].map(|cut| usize::from(u16::from_be_bytes(cut)));
    let mut pairs = Vec::new();
    for cut in cuts {
        let (endpoint, client) = rest.split_at(cut % (rest.len() + 1));
        let endpoint = String::from_utf8_lossy(endpoint);
        pairs.extend(clients(client).map(|client| (endpoint.clone(), client)));
    }
    let keys = pairs.iter().map(|(endpoint, client)| {
        let key = Key::new(endpoint, *client).ok();
        assert_eq!(key.is_none(), endpoint.len() > 256);
        key
    });
    let keys: Vec<Option<Key>> = keys.collect();
    for ((endpoint, client), key) in pairs.iter().zip(&keys) {
        let Some(key) = key else { continue };
        assert_eq!((&key.endpoint(), key.client()), (endpoint, *client));
        assert_eq!(Key::decode(key.as_bytes()).as_ref(), Some(key));
        for (other, their_key) in pairs.iter().zip(&keys) {
            let Some(their_key) = their_key else { continue };
            let same = (endpoint, client) == (&other.0, &other.1);
            assert_eq!(key == their_key, same, "{key} and {their_key}");
            let client = ClientBytes::of(*client);
            let are = KeyParts::new(endpoint, &client).map(|parts| parts.are(their_key));
            assert_eq!(are.ok(), Some(same), "{key} and {their_key}");
        }
    }
}

/// Whoever these bytes may be.
fn clients(bytes: &[u8]) -> impl Iterator<Item = Client<'_>> {
    let four = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    let address = four.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from));
    let digest = bytes.try_into().map(Client::Digest);
    let others = address.map(Client::from).into_iter().chain(digest);
    std::iter::once(Client::from(bytes)).chain(others)
}
