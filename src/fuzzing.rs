//! What must hold of any bytes: properties that the fuzz targets and the tests share.
//!
//! Compiled for tests and under `cargo fuzz` only; no part of the API. Each property takes bytes as
//! they come, and panics if it does not hold.

use crate::error::Error;
use crate::limiter::{Quota, SlidingWindow};

pub use crate::vault::fuzzing::{key, row};

/// A text is a quota that prints back to itself, or an error that names a part of the text.
pub fn quota(text: &str) {
    match text.parse::<Quota>() {
        Ok(quota) => {
            assert_eq!(quota.to_string().parse().ok(), Some(quota), "{text:?}");
            let same = Quota::new(quota.limit(), quota.window());
            assert_eq!(same.ok(), Some(quota), "{text:?}");
        }
        Err(error) => {
            let Error::InvalidQuota { quota, part, .. } = &error else {
                unreachable!("{error:?}");
            };
            assert!(quota == text && text.contains(part), "{error:?}");
        }
    }
    if let Ok(window) = text.parse::<SlidingWindow>() {
        assert_eq!(window.to_string().parse().ok(), Some(window), "{text:?}");
    }
}

/// Lines, of which the first is the peer, the second the trusted proxies with commas between, and
/// the others are `X-Forwarded-For`: what a client writes does not change who it is.
#[cfg(feature = "http")]
pub fn forwarded(input: &[u8]) {
    use crate::http::TrustedProxies;

    let mut lines = input.split(|byte| *byte == b'\n');
    let mut text = || std::str::from_utf8(lines.next().unwrap_or_default()).unwrap_or_default();
    let (peer, proxies) = (text(), text());
    let (Ok(peer), Ok(trusted)) = (peer.parse(), TrustedProxies::new(proxies.split(','))) else {
        return;
    };
    let lines: Vec<&[u8]> = lines.collect();
    let found = client(&trusted, peer, &lines);
    if !trusted.contains(peer) {
        assert_eq!(found, peer.to_canonical(), "nobody else is believed");
    }
    if !trusted.contains(found) {
        let text: &[u8] = b"192.0.2.66, [, 2001:db8::66";
        let spoofed = [&[text], &lines[..]].concat();
        assert_eq!(
            client(&trusted, peer, &spoofed),
            found,
            "text left of the client"
        );
    }
    if trusted.contains(peer) {
        let hop = peer.to_string();
        let passed_on = [&lines[..], &[hop.as_bytes()]].concat();
        assert_eq!(client(&trusted, peer, &passed_on), found, "one more proxy");
    }
    // Those that are no field values were left out above.
    if lines
        .iter()
        .all(|line| http::HeaderValue::from_bytes(line).is_ok())
    {
        let joined = lines.join(&b", "[..]);
        assert_eq!(
            client(&trusted, peer, &[&joined]),
            found,
            "one line for all"
        );
    }
}

#[cfg(feature = "http")]
fn client(
    trusted: &crate::http::TrustedProxies,
    peer: std::net::IpAddr,
    lines: &[&[u8]],
) -> std::net::IpAddr {
    use crate::http::{KeyFunction, Peer, ip_key_forwarded};

    let mut request = http::Request::new(()).into_parts().0;
    request.extensions.insert(Peer(peer));
    let values = lines.iter().map(|line| http::HeaderValue::from_bytes(line));
    for value in values.flatten() {
        request.headers.append("x-forwarded-for", value);
    }
    let key = ip_key_forwarded(trusted.clone());
    assert!(key.client(&request).is_some());
    key.address(&request).unwrap_or(peer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_text_is_a_quota_that_prints_back_or_an_error_that_names_a_part(
            text in "\\PC{0,20}",
            likely in "[0-9]{1,6}(/| per )([0-9]{0,4}( |)(ms|s|min|minutes|m|h|hour|d|w|week)){1,3}",
            list in prop::collection::vec("[1-9][0-9]{0,4}/([1-9] |)(ms|second|hours|day|week)", 1..4),
        ) {
            quota(&text);
            quota(&likely);
            quota(&list.join("; "));
        }

        #[test]
        fn any_bytes_are_a_row_or_none_and_a_whole_one_is_decided_without_a_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..120),
            (key, header, value) in (
                prop::collection::vec(any::<u8>(), 0..20),
                prop::array::uniform24(any::<u8>()),
                prop::collection::vec(prop_oneof![3 => any::<u8>(), 1 => 250..=255_u8], 0..60),
            ),
        ) {
            row(&bytes);
            let length = u8::try_from(key.len()).expect("it is short");
            row(&[&[length][..], &key, &[1, 0], &header, &value].concat());
        }

        #[test]
        fn two_cuts_of_the_same_bytes_are_one_key_only_if_they_are_one_cut(
            cuts in prop::array::uniform4(0..2_u8),
            bytes in prop::collection::vec(prop_oneof![any::<u8>(), 0..3_u8], 0..600),
        ) {
            key(&[&cuts[..], &bytes].concat());
            key(&bytes);
        }
    }

    #[cfg(feature = "http")]
    proptest! {
        #[test]
        fn what_a_client_writes_does_not_change_who_it_is(
            peer in "(10\\.0\\.0\\.[0-9]|192\\.0\\.2\\.1|::ffff:10\\.0\\.0\\.1|2001:db8::[0-9])",
            proxies in "(10\\.0\\.0\\.[0-9]|10\\.0\\.0\\.0/8|2001:db8::/64)(,192\\.0\\.2\\.0/28|)",
            lines in prop::collection::vec(
                prop::collection::vec("([0-9.]{1,9}|\\[?2001:db8::[0-9]\\]?(:80|)|10\\.0\\.0\\.[0-9]|[ -~]{0,9})", 0..4),
                0..4,
            ),
            bytes in prop::collection::vec(any::<u8>(), 0..80),
        ) {
            let lines: Vec<String> = lines.into_iter().map(|hops| hops.join(", ")).collect();
            let head = format!("{peer}\n{proxies}\n");
            forwarded(format!("{head}{}", lines.join("\n")).as_bytes());
            forwarded(&[head.as_bytes(), &bytes].concat());
            forwarded(&bytes);
        }
    }
}
