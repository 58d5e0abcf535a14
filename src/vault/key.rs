//! Keys: an endpoint and a client, as bytes.
//!
//! # Format 1
//!
//! | bytes | content |
//! |---|---|
//! | 1 | the format, 1 |
//! | 2 | length of the endpoint in bytes, big endian |
//! | | the endpoint, UTF-8 |
//! | 1 | what the client is: 1 text, 2 address, 3 digest |
//! | 2 | length of the client in bytes, big endian |
//! | | the client: bytes as given, 4 or 16 bytes of address, 32 bytes of SHA-256 |
//!
//! The encoding is injective: no two pairs share a key. It is a format of the file, independent of
//! the storage engine's own key types; the rows of one endpoint sort together. A client of more
//! than 256 bytes is replaced by its SHA-256: clients choose that text, so it is never cut.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::fmt::{self, Write};
use std::hash::{Hash, Hasher};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};

const FORMAT: u8 = 1;
const LONGEST_ENDPOINT: usize = 256;
const LONGEST_CLIENT: usize = 256;

const TEXT: u8 = 1;
const ADDRESS: u8 = 2;
const DIGEST: u8 = 3;

/// Who is counted. Made from text, bytes or an address.
///
/// The three are apart: the text `"203.0.113.7"` and the address 203.0.113.7 are two clients. An
/// IPv4-mapped IPv6 address is the IPv4 address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Client<'a> {
    /// A name, an account, a token: compared byte by byte, so normalise it first.
    Text(&'a [u8]),
    /// An address.
    Address(IpAddr),
    /// The SHA-256 of a text of more than 256 bytes.
    Digest([u8; 32]),
}

/// What stands for a text that is too long.
#[inline(never)]
fn digest_of(text: &[u8]) -> [u8; 32] {
    Sha256::digest(text).into()
}

impl<'a> From<&'a str> for Client<'a> {
    #[inline]
    fn from(text: &'a str) -> Self {
        Self::from(text.as_bytes())
    }
}

impl<'a> From<&'a String> for Client<'a> {
    #[inline]
    fn from(text: &'a String) -> Self {
        Self::from(text.as_bytes())
    }
}

impl<'a> From<&'a [u8]> for Client<'a> {
    #[inline]
    fn from(text: &'a [u8]) -> Self {
        if text.len() > LONGEST_CLIENT {
            Self::Digest(digest_of(text))
        } else {
            Self::Text(text)
        }
    }
}

impl<'a> From<&&'a str> for Client<'a> {
    fn from(text: &&'a str) -> Self {
        Self::from(text.as_bytes())
    }
}

impl<'a> From<&'a Vec<u8>> for Client<'a> {
    fn from(text: &'a Vec<u8>) -> Self {
        Self::from(text.as_slice())
    }
}

impl<'a, const N: usize> From<&'a [u8; N]> for Client<'a> {
    fn from(text: &'a [u8; N]) -> Self {
        Self::from(text.as_slice())
    }
}

impl From<&IpAddr> for Client<'_> {
    fn from(address: &IpAddr) -> Self {
        (*address).into()
    }
}

impl From<IpAddr> for Client<'_> {
    fn from(address: IpAddr) -> Self {
        Self::Address(address.to_canonical())
    }
}

impl From<Ipv4Addr> for Client<'_> {
    fn from(address: Ipv4Addr) -> Self {
        IpAddr::V4(address).into()
    }
}

impl From<Ipv6Addr> for Client<'_> {
    fn from(address: Ipv6Addr) -> Self {
        IpAddr::V6(address).into()
    }
}

impl<'a> Client<'a> {
    /// The text, if it is one.
    #[must_use]
    pub fn text(&self) -> Option<&'a str> {
        match self {
            Self::Text(text) => std::str::from_utf8(text).ok(),
            Self::Address(_) | Self::Digest(_) => None,
        }
    }
}

/// Text with control characters and bytes that are no text escaped; a digest as `sha256:..`.
impl fmt::Display for Client<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => escape(f, text),
            Self::Address(address) => address.fmt(f),
            Self::Digest(digest) => {
                f.write_str("sha256:")?;
                digest.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }
    }
}

fn escape(f: &mut fmt::Formatter<'_>, text: &[u8]) -> fmt::Result {
    for chunk in text.utf8_chunks() {
        for character in chunk.valid().chars() {
            match character {
                '"' | '\'' => f.write_char(character)?,
                _ => write!(f, "{}", character.escape_debug())?,
            }
        }
        for byte in chunk.invalid() {
            write!(f, "\\x{byte:02x}")?;
        }
    }
    Ok(())
}

/// What a row is found by: an (endpoint, client) pair.
///
/// ```
/// use ratevault::{Client, Key};
///
/// let key = Key::new("login", "ada")?;
/// assert_eq!(key.endpoint(), "login");
/// assert_eq!(key.client(), Client::from("ada"));
/// assert_eq!(key.to_string(), "login/ada");
/// # Ok::<(), ratevault::Error>(())
/// ```
#[derive(Clone)]
pub struct Key(Encoded);

/// How many bytes of a key need no memory elsewhere: "password-reset" and a network fit.
const SHORT: usize = 38;

#[derive(Clone)]
enum Encoded {
    /// Invariant: `length` is at most `SHORT`, and the bytes beyond are zero.
    Short {
        length: u8,
        bytes: [u8; SHORT],
    },
    Long(Box<[u8]>),
}

impl Encoded {
    fn new(parts: &[&[u8]]) -> Self {
        let length = parts.iter().map(|part| part.len()).sum();
        let mut bytes = [0; SHORT];
        let (Some(mut rest), Ok(short)) = (bytes.get_mut(..length), u8::try_from(length)) else {
            return Self::Long(parts.concat().into());
        };
        for part in parts {
            let (place, after) = rest.split_at_mut(part.len());
            place.copy_from_slice(part);
            rest = after;
        }
        Self::Short {
            length: short,
            bytes,
        }
    }

    #[inline]
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Short { length, bytes } => bytes.get(..usize::from(*length)).unwrap_or_default(),
            Self::Long(bytes) => bytes,
        }
    }
}

/// A client as it stands in a key.
pub(crate) enum ClientBytes<'a> {
    /// At most 256 bytes.
    Text(&'a [u8]),
    V4([u8; 4]),
    V6([u8; 16]),
    Digest([u8; 32]),
}

impl<'a> ClientBytes<'a> {
    #[inline]
    pub(crate) fn of(client: Client<'a>) -> Self {
        match client {
            // Not every text comes through `From`.
            Client::Text(text) if text.len() > LONGEST_CLIENT => Self::Digest(digest_of(text)),
            Client::Text(text) => Self::Text(text),
            Client::Address(address) => match address.to_canonical() {
                IpAddr::V4(address) => Self::V4(address.octets()),
                IpAddr::V6(address) => Self::V6(address.octets()),
            },
            Client::Digest(digest) => Self::Digest(digest),
        }
    }
}

/// A key that is not put together: enough to find its row in memory.
#[derive(Clone, Copy)]
pub(crate) struct KeyParts<'a> {
    endpoint: &'a [u8],
    tag: u8,
    /// At most 256 bytes.
    client: &'a [u8],
}

impl<'a> KeyParts<'a> {
    /// The parts of the key of `client` at `endpoint`.
    #[inline]
    pub(crate) fn new(endpoint: &'a str, client: &'a ClientBytes<'_>) -> Result<Self> {
        endpoint_length(endpoint)?;
        let (tag, client) = match client {
            ClientBytes::Text(text) => (TEXT, *text),
            ClientBytes::V4(octets) => (ADDRESS, &octets[..]),
            ClientBytes::V6(octets) => (ADDRESS, &octets[..]),
            ClientBytes::Digest(digest) => (DIGEST, &digest[..]),
        };
        Ok(Self {
            endpoint: endpoint.as_bytes(),
            tag,
            client,
        })
    }

    fn key(&self) -> Key {
        let parts = [&self.head(), self.endpoint, &self.middle(), self.client];
        Key(Encoded::new(&parts))
    }

    /// Whether they make up `key`.
    #[inline]
    pub(super) fn are(&self, key: &Key) -> bool {
        let (endpoint, client) = (self.endpoint.len(), self.client.len());
        let bytes = key.as_bytes();
        let Some((head, rest)) = bytes.split_first_chunk() else {
            return false;
        };
        let Some((own, rest)) = rest.split_at_checked(endpoint) else {
            return false;
        };
        let Some((middle, theirs)) = rest.split_first_chunk() else {
            return false;
        };
        theirs.len() == client
            && *head == self.head()
            && *middle == self.middle()
            && theirs == self.client
            && own == self.endpoint
    }

    /// What stands before the endpoint.
    #[inline]
    fn head(&self) -> [u8; 3] {
        let [high, low] = counted(self.endpoint);
        [FORMAT, high, low]
    }

    /// What stands between the endpoint and the client.
    #[inline]
    fn middle(&self) -> [u8; 3] {
        let [high, low] = counted(self.client);
        [self.tag, high, low]
    }
}

/// Equal keys have equal parts, and so equal hashes; that of two parts which share bytes otherwise may
/// be equal too.
impl Hash for KeyParts<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write(self.endpoint);
        state.write(self.client);
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            // Of one length, known here: what lies beyond the keys is zero.
            (
                Encoded::Short { bytes, length },
                Encoded::Short {
                    bytes: b,
                    length: l,
                },
            ) => bytes == b && length == l,
            _ => self.as_bytes() == other.as_bytes(),
        }
    }
}

impl Eq for Key {}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Key {
    fn cmp(&self, other: &Self) -> Ordering {
        self.as_bytes().cmp(other.as_bytes())
    }
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // It states its own lengths.
        state.write(self.as_bytes());
    }
}

impl Key {
    /// The key of `client` at `endpoint`.
    ///
    /// # Errors
    ///
    /// [`Error::EndpointTooLong`] if the endpoint has more than 256 bytes.
    pub fn new<'c>(endpoint: &str, client: impl Into<Client<'c>>) -> Result<Self> {
        let client = ClientBytes::of(client.into());
        Ok(KeyParts::new(endpoint, &client)?.key())
    }

    /// What it is made of. Of bytes that are no key: they are its endpoint.
    pub(crate) fn parts(&self) -> KeyParts<'_> {
        let bytes = self.as_bytes();
        let parts = bytes
            .split_first_chunk()
            .and_then(|([_, high, low], rest)| {
                let length = usize::from(u16::from_be_bytes([*high, *low]));
                let (endpoint, rest) = rest.split_at_checked(length)?;
                let ([tag, _, _], client) = rest.split_first_chunk()?;
                Some(KeyParts {
                    endpoint,
                    tag: *tag,
                    client,
                })
            });
        parts.unwrap_or(KeyParts {
            endpoint: bytes,
            tag: 0,
            client: &[],
        })
    }

    /// What the keys of `endpoint`, and no others, start with.
    pub(crate) fn prefix(endpoint: &str) -> Result<Vec<u8>> {
        let [high, low] = endpoint_length(endpoint)?;
        Ok([&[FORMAT, high, low], endpoint.as_bytes()].concat())
    }

    /// The key that `bytes` are, if they are one.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        parts(bytes)?;
        Some(Self(Encoded::new(&[bytes])))
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        self.0.bytes()
    }

    /// The key that these bytes are, whether or not they decode.
    pub(super) fn of_bytes(bytes: &[u8]) -> Self {
        Self(Encoded::new(&[bytes]))
    }

    /// No key: no bytes at all.
    pub(super) fn none() -> Self {
        Self(Encoded::new(&[]))
    }

    /// How many bytes it holds outside of itself.
    pub(super) fn elsewhere(&self) -> usize {
        match &self.0 {
            Encoded::Short { .. } => 0,
            Encoded::Long(bytes) => bytes.len(),
        }
    }

    /// The endpoint.
    #[must_use]
    pub fn endpoint(&self) -> Cow<'_, str> {
        parts(self.as_bytes()).map_or(Cow::Borrowed(""), |(endpoint, _)| {
            String::from_utf8_lossy(endpoint)
        })
    }

    /// The client.
    #[must_use]
    pub fn client(&self) -> Client<'_> {
        parts(self.as_bytes()).map_or(Client::Text(&[]), |(_, client)| client)
    }
}

/// `endpoint/client`, escaped as [`Client`] is.
impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        escape(f, self.endpoint().as_bytes())?;
        write!(f, "/{}", self.client())
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({self})")
    }
}

/// The error for a row that is damaged, also one whose key does not decode.
pub(crate) fn corrupt_row(table: &str, key: &[u8]) -> Error {
    let (endpoint, client) = parts(key).unwrap_or((&[], Client::Text(key)));
    Error::CorruptRow {
        table: table.to_owned(),
        endpoint: String::from_utf8_lossy(endpoint).into_owned(),
        client: client
            .text()
            .map_or_else(|| client.to_string(), str::to_owned),
    }
}

fn endpoint_length(endpoint: &str) -> Result<[u8; 2]> {
    if endpoint.len() > LONGEST_ENDPOINT {
        return Err(Error::EndpointTooLong {
            length: endpoint.len(),
            limit: LONGEST_ENDPOINT,
        });
    }
    Ok(counted(endpoint.as_bytes()))
}

/// The length of a part, which is at most 256.
fn counted(part: &[u8]) -> [u8; 2] {
    u16::try_from(part.len()).unwrap_or(u16::MAX).to_be_bytes()
}

fn parts(bytes: &[u8]) -> Option<(&[u8], Client<'_>)> {
    let rest = bytes.strip_prefix(&[FORMAT])?;
    let (endpoint, rest) = split_counted(rest)?;
    let (&tag, rest) = rest.split_first()?;
    let (client, rest) = split_counted(rest)?;
    if !rest.is_empty() {
        return None;
    }
    let client = match tag {
        TEXT => Client::Text(client),
        ADDRESS => Client::Address(match client.len() {
            4 => IpAddr::from(<[u8; 4]>::try_from(client).ok()?),
            _ => IpAddr::from(<[u8; 16]>::try_from(client).ok()?),
        }),
        DIGEST => Client::Digest(client.try_into().ok()?),
        _ => return None,
    };
    Some((endpoint, client))
}

fn split_counted(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first_chunk()?;
    rest.split_at_checked(usize::from(u16::from_be_bytes(*length)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What format 1 must decode to, for as long as it is read.
    #[test]
    fn the_fixture_of_format_1_decodes() {
        let fixture = include_str!("../../tests/fixtures/keys-1.txt");
        let mut lines = 0;
        for line in fixture.lines().filter(|line| !line.starts_with('#')) {
            let mut fields = line.split('\t');
            let (hex, endpoint) = (
                fields.next().expect("hex"),
                fields.next().expect("endpoint"),
            );
            let client = match (fields.next().expect("tag"), fields.next().expect("client")) {
                ("text", client) => Client::Text(client.as_bytes()),
                ("address", client) => Client::Address(client.parse().expect("an address")),
                ("digest", _) => Client::from(&LONG[..]),
                other => panic!("{other:?}"),
            };
            let bytes = crate::vault::row::from_hex(hex);
            let key = Key::decode(&bytes).expect(line);
            assert_eq!((&*key.endpoint(), key.client()), (endpoint, client));
            assert_eq!(Key::new(endpoint, client).expect("a key"), key);
            lines += 1;
        }
        assert_eq!(lines, 6);
    }

    const LONG: [u8; 300] = [b'a'; 300];

    #[test]
    fn text_and_address_are_apart_and_mapped_addresses_are_not() {
        let address: IpAddr = "203.0.113.7".parse().expect("an address");
        let mapped: IpAddr = "::ffff:203.0.113.7".parse().expect("an address");
        let key = |client: Client<'_>| Key::new("login", client).expect("a key");
        assert_ne!(key("203.0.113.7".into()), key(address.into()));
        assert_eq!(key(mapped.into()), key(address.into()));
        assert_eq!(key(Client::Address(mapped)), key(address.into()));
    }

    #[test]
    fn a_long_client_is_hashed_and_a_long_endpoint_refused() {
        let long = [7; 257];
        let key = Key::new("e", &long[..]).expect("a key");
        assert_eq!(key, Key::new("e", Client::Text(&long)).expect("a key"));
        assert!(matches!(key.client(), Client::Digest(_)));
        assert!(key.to_string().starts_with("e/sha256:"));
        assert!(matches!(
            Key::new(&"e".repeat(257), "c"),
            Err(Error::EndpointTooLong { length: 257, .. })
        ));
    }

    #[test]
    fn nothing_that_controls_a_terminal_is_printed() {
        let key = Key::new("a\n\0", &b"\x1b[2J\xff\x7f"[..]).expect("a key");
        assert_eq!(key.to_string(), r"a\n\0/\u{1b}[2J\xff\u{7f}");
    }

    proptest! {
        #[test]
        fn the_encoding_is_injective_and_decodes(
            a in (".{0,60}", prop::collection::vec(any::<u8>(), 0..300)),
            b in (".{0,60}", prop::collection::vec(any::<u8>(), 0..300)),
        ) {
            let key = |(endpoint, client): &(String, Vec<u8>)| {
                Key::new(endpoint, client.as_slice()).expect("a key")
            };
            prop_assert_eq!(a == b, key(&a) == key(&b));
            let decoded = Key::decode(key(&a).as_bytes()).expect("decodes");
            prop_assert_eq!(decoded.endpoint(), a.0.as_str());
            prop_assert_eq!(decoded.client(), Client::from(a.1.as_slice()));
            prop_assert!(key(&a).as_bytes().starts_with(&Key::prefix(&a.0).expect("a prefix")));
            prop_assert_eq!(a.0 == b.0, key(&a).as_bytes().starts_with(&Key::prefix(&b.0).expect("a prefix")));
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            if let Some(key) = Key::decode(&bytes) {
                let _ = (key.endpoint(), key.client());
            }
            let _ = corrupt_row("t", &bytes).to_string();
        }
    }
}
