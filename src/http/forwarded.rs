//! Who sent a request: the walk through `X-Forwarded-For`. Pure; works on bytes, allocates nothing.
//!
//! The header is a list to which each proxy appends the address it was called from. All but what a
//! trusted proxy appended is text that the client wrote.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddrV4};
use std::str::{self, FromStr};
use std::sync::Arc;

use ipnet::{IpNet, Ipv4Net};

use crate::error::{Error, Result};

/// The proxies whose `X-Forwarded-For` is believed: addresses and CIDR ranges.
///
/// List the proxies themselves, not networks that also have users in them: whoever has a trusted
/// address can choose the address it is counted by.
///
/// ```
/// use ratevault::http::TrustedProxies;
///
/// let trusted = TrustedProxies::new(["10.0.0.7", "2001:db8:ff::/48"])?;
/// assert!(trusted.contains("10.0.0.7".parse().unwrap()));
/// assert!(!trusted.contains("10.0.0.8".parse().unwrap()));
/// assert!(TrustedProxies::new(["0.0.0.0/0"]).is_err());
/// # Ok::<(), ratevault::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrustedProxies(Arc<[IpNet]>);

impl TrustedProxies {
    /// Trusts these addresses (`10.0.0.7`) and ranges (`10.0.0.0/24`); none: nobody.
    ///
    /// An IPv4-mapped IPv6 address or range is the IPv4 one.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] for what is neither, such as a host name, for a range whose host
    /// bits are not zero, and for one that holds every address.
    pub fn new<I>(proxies: I) -> Result<Self>
    where
        I: IntoIterator,
        I::Item: AsRef<str>,
    {
        let parsed = proxies.into_iter().map(|proxy| range(proxy.as_ref()));
        parsed.collect::<Result<_>>().map(Self)
    }

    /// Whether `address` is one of them.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.0.iter().any(|range| range.contains(&address))
    }

    /// Whether nobody is trusted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The client of a request that came from `peer` with these `X-Forwarded-For` lines.
    ///
    /// Nothing is believed unless the peer is trusted. Then the hops are walked from the right, over
    /// trusted ones: the first other one is the client. If all are trusted it is the leftmost, and
    /// the peer if there is none. A hop that is no address ends the walk at the last trusted one, as
    /// what stands left of it may be the client's own text.
    pub(super) fn client<'l, L>(&self, peer: IpAddr, lines: L) -> IpAddr
    where
        L: DoubleEndedIterator<Item = &'l [u8]>,
    {
        let mut client = peer.to_canonical();
        let hops = lines
            .rev()
            .flat_map(|line| line.rsplit(|byte| *byte == b','));
        let mut hops = hops.map(trimmed).filter(|hop| !hop.is_empty());
        while self.contains(client) {
            match hops.next().map(address) {
                Some(Some(hop)) => client = hop,
                Some(None) | None => break,
            }
        }
        client
    }
}

/// The first 96 bits of 64:ff9b::/96.
const TRANSLATED: u128 = 0x0064_ff9b_0000_0000_0000_0000;

/// The range that `text` names.
fn range(text: &str) -> Result<IpNet> {
    let invalid = |reason| Error::InvalidSetting {
        setting: "a trusted proxy",
        value: format!("{text:?}"),
        reason,
    };
    let range = match (IpAddr::from_str(text), IpNet::from_str(text)) {
        (Ok(address), _) => IpNet::from(address),
        (_, Ok(range)) => range,
        _ => {
            return Err(invalid(
                "it has to be an address or a range such as 10.0.0.0/24; names are not looked up",
            ));
        }
    };
    if range.trunc() != range {
        return Err(invalid(
            "bits after the prefix are set; for one address leave the prefix out, for a range set them to zero",
        ));
    }
    match canonical(range) {
        range if range.prefix_len() == 0 => Err(invalid(
            "it would trust everybody, and so whatever a client writes; list the proxies' own addresses",
        )),
        range => Ok(range),
    }
}

/// A range of IPv4-mapped addresses as the IPv4 range.
fn canonical(range: IpNet) -> IpNet {
    let IpNet::V6(mapped) = range else {
        return range;
    };
    let prefix = mapped.prefix_len().checked_sub(96);
    let address = mapped.addr().to_ipv4_mapped();
    let unmapped = address.zip(prefix).and_then(|(address, prefix)| {
        // A prefix of more than 32 bits cannot come out of one of at most 128.
        Ipv4Net::new(address, prefix).ok()
    });
    unmapped.map_or(range, IpNet::V4)
}

/// Without optional whitespace (RFC 9110, 5.6.3).
fn trimmed(hop: &[u8]) -> &[u8] {
    let is_space = |byte: &u8| matches!(byte, b' ' | b'\t');
    let start = hop.iter().position(|byte| !is_space(byte));
    let end = hop.iter().rposition(|byte| !is_space(byte));
    match (start, end) {
        (Some(start), Some(end)) => hop.get(start..=end).unwrap_or_default(),
        _ => &[],
    }
}

/// `address`, `v4:port`, `[v6]` or `[v6]:port`. No zones: they mean something to one host only.
fn address(hop: &[u8]) -> Option<IpAddr> {
    let hop = str::from_utf8(hop).ok()?;
    let address = match hop.strip_prefix('[') {
        Some(bracketed) => {
            let (address, rest) = bracketed.split_once(']')?;
            let address = Ipv6Addr::from_str(address).ok()?;
            let port = rest.strip_prefix(':');
            (rest.is_empty() || port.is_some_and(is_port)).then_some(IpAddr::V6(address))?
        }
        None => IpAddr::from_str(hop).or_else(|_| with_port(hop)).ok()?,
    };
    Some(address.to_canonical())
}

fn with_port(hop: &str) -> Result<IpAddr, std::net::AddrParseError> {
    SocketAddrV4::from_str(hop).map(|socket| IpAddr::V4(*socket.ip()))
}

fn is_port(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit()) && u16::from_str(text).is_ok()
}

/// The first `prefix` bits of an IPv6 address; an IPv4 address as it is, also one that a translator
/// has put into IPv6 (RFC 6052, 2.1): behind it are as many hosts as there are addresses.
pub(super) fn masked(address: IpAddr, prefix: u8) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => IpAddr::V4(address),
        IpAddr::V6(address) if address.to_bits() >> 32 == TRANSLATED => {
            let bits = u32::try_from(address.to_bits() & u128::from(u32::MAX));
            IpAddr::V4(Ipv4Addr::from_bits(bits.unwrap_or_default()))
        }
        IpAddr::V6(address) => {
            let rest = 128_u32.saturating_sub(prefix.into());
            let mask = u128::MAX.checked_shl(rest).unwrap_or(0);
            IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & mask))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn a_range_that_trusts_everybody_or_nobody_in_particular_is_an_error() {
        let wrong = [
            "0.0.0.0/0",
            "::/0",
            "::ffff:0:0/96",
            "10.0.0.1/8",
            "::ffff:10.0.0.1/104",
            "2001:db8::1/64",
            "proxy.example",
            "localhost",
            "10.0.0.0/33",
            "10.0.0",
            "10.0.0.1:80",
            "fe80::1%eth0",
            " 10.0.0.1",
            "",
        ];
        for text in wrong {
            let error = TrustedProxies::new([text]).expect_err(text).to_string();
            assert!(error.contains(&format!("{text:?}")), "{error}");
        }
    }

    #[test]
    fn a_mapped_range_is_the_ipv4_one() {
        let trusted = TrustedProxies::new(["::ffff:10.0.0.0/104", "::ffff:192.0.2.1"]);
        let trusted = trusted.expect("ranges");
        assert!(trusted.contains(ip("10.255.0.1")));
        assert!(trusted.contains(ip("::ffff:10.255.0.1")));
        assert!(trusted.contains(ip("192.0.2.1")));
        assert!(!trusted.contains(ip("11.0.0.1")));
    }

    #[test]
    fn a_mapped_address_is_unmapped_before_it_is_masked() {
        assert_eq!(masked(ip("::ffff:192.0.2.1"), 64), ip("192.0.2.1"));
        assert_eq!(masked(ip("64:ff9b::192.0.2.1"), 64), ip("192.0.2.1"));
        assert_eq!(masked(ip("2001:db8:1:2:3::4"), 64), ip("2001:db8:1:2::"));
        assert_eq!(
            masked(ip("2001:db8:1:2:3::4"), 128),
            ip("2001:db8:1:2:3::4")
        );
        assert_eq!(masked(ip("2001:db8:1:2:3::4"), 1), ip("::"));
    }

    #[test]
    fn a_port_is_digits_and_nothing_else() {
        let good = ["[::1]:0", "[::1]:65535", "192.0.2.1:1"];
        assert!(good.iter().all(|hop| address(hop.as_bytes()).is_some()));
        let bad = [
            "[::1]:",
            "[::1]:+1",
            "[::1]:65536",
            "[::1]1",
            "192.0.2.1:",
            "192.0.2.1:x",
        ];
        assert!(bad.iter().all(|hop| address(hop.as_bytes()).is_none()));
    }

    proptest! {
        #[test]
        fn no_header_panics_or_gives_an_address_that_is_not_in_it(
            lines in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..60), 0..4),
        ) {
            let trusted = TrustedProxies::new(["10.0.0.0/8"]).expect("a range");
            let peer = ip("10.0.0.1");
            let found = trusted.client(peer, lines.iter().map(Vec::as_slice));
            let mut hops = lines.iter().flat_map(|line| line.split(|byte| *byte == b','));
            prop_assert!(found == peer || hops.any(|hop| address(trimmed(hop)) == Some(found)));
        }

        #[test]
        fn what_a_client_writes_never_changes_what_its_proxy_wrote(
            spoofed in prop::collection::vec("[ -~]{0,40}", 0..4),
            client in any::<u32>().prop_map(|bits| IpAddr::from(bits.to_be_bytes())),
        ) {
            let trusted = TrustedProxies::new(["10.0.0.0/8"]).expect("a range");
            prop_assume!(!trusted.contains(client));
            let line = spoofed.iter().map(|text| format!("{text}, ")).collect::<String>();
            let line = format!("{line}{client}, 10.0.0.2");
            let found = trusted.client(ip("10.0.0.1"), [line.as_bytes()].into_iter());
            prop_assert_eq!(found, client);
        }
    }
}
