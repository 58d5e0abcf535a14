//! Rows: a header, the value, a checksum.
//!
//! # Format 1
//!
//! | bytes | content |
//! |---|---|
//! | 1 | the format, 1 |
//! | 1 | 1 if the row is filed in the shared class of the deadline index, else 0 |
//! | 8 | `expires_at`: from when on the row is gone, ms since the Unix epoch, little endian |
//! | 8 | `ttl`: how long it was to live when it was last written, ms, little endian |
//! | 8 | `filed_at`: the instant under which the deadline index files it, ms, little endian |
//! | | the value, see the codec |
//! | 4 | CRC-32 (IEEE 802.3) of the key, then all bytes before it, little endian |

use serde::Serialize;
use serde::de::DeserializeOwned;

const FORMAT: u8 = 1;

/// A type that a [`Vault`](crate::Vault) can hold.
///
/// Values are stored with bincode, which writes no field names: do not use serde's `flatten`,
/// `skip`, `tag` or `untagged` attributes on a row.
///
/// ```
/// use ratevault::{Key, Row, Vault};
/// use serde::{Deserialize, Serialize};
/// use std::time::Duration;
///
/// #[derive(Serialize, Deserialize)]
/// struct Session {
///     user: u64,
/// }
///
/// impl Row for Session {
///     const KIND: &'static str = "session/1";
/// }
///
/// let sessions: Vault<Session> = Vault::builder("sessions").in_memory().open()?;
/// let key = Key::new("web", "token")?;
/// sessions.put(&key, Session { user: 7 }, Duration::from_secs(3_600))?;
/// assert_eq!(sessions.get(&key)?.map(|session| session.user), Some(7));
/// # Ok::<(), ratevault::Error>(())
/// ```
pub trait Row: Serialize + DeserializeOwned + Send + Sync + 'static {
    /// What a table of such rows is stamped with: a name and a version, such as `"session/1"`.
    ///
    /// Change it when the encoding changes. A table of another kind is refused.
    const KIND: &'static str;

    /// How many bytes the value holds outside of itself, roughly. Default: 0.
    ///
    /// A buffered vault bounds its memory with it: say it if a value has lists or text in it.
    fn memory(&self) -> usize {
        0
    }

    /// A copy, if that takes much less time than encoding the value. Default: none.
    ///
    /// A buffered vault has callers wait while it takes a row along to the file: for the copy, if
    /// there is one, which is then encoded while nobody waits; else until the row is encoded.
    fn copy(&self) -> Option<Self>
    where
        Self: Sized,
    {
        None
    }
}

/// When a row ends, and where the deadline index files it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(super) in_shared_class: bool,
    pub(super) expires_at: u64,
    pub(super) ttl: u64,
    /// Invariant: not after `expires_at`.
    pub(super) filed_at: u64,
}

impl Header {
    /// When the row was last written, by the clock that wrote it.
    pub(super) fn last_write(&self) -> u64 {
        self.expires_at.saturating_sub(self.ttl)
    }

    pub(super) fn has_expired(&self, now: u64) -> bool {
        self.expires_at <= now
    }
}

/// Puts the bytes of a row into `bytes`, which are empty.
pub(super) fn encode_into(key: &[u8], header: Header, value: &[u8], bytes: &mut Vec<u8>) {
    bytes.extend([FORMAT, u8::from(header.in_shared_class)]);
    for instant in [header.expires_at, header.ttl, header.filed_at] {
        bytes.extend(instant.to_le_bytes());
    }
    bytes.extend(value);
    let checksum = checksum(key, bytes);
    bytes.extend(checksum.to_le_bytes());
}

/// The header and the value of a row that is whole.
pub(super) fn decode<'a>(key: &[u8], bytes: &'a [u8]) -> Option<(Header, &'a [u8])> {
    let (content, stated) = bytes.split_last_chunk()?;
    if u32::from_le_bytes(*stated) != checksum(key, content) {
        return None;
    }
    header_of(content)
}

/// What the header of a row says that fails its checksum: a guess at where it is filed.
pub(super) fn guess_header(bytes: &[u8]) -> Option<Header> {
    header_of(bytes).map(|(header, _)| header)
}

fn header_of(content: &[u8]) -> Option<(Header, &[u8])> {
    let (&[format, class], rest) = content.split_first_chunk()?;
    let (expires_at, rest) = rest.split_first_chunk()?;
    let (ttl, rest) = rest.split_first_chunk()?;
    let (filed_at, value) = rest.split_first_chunk()?;
    let header = Header {
        in_shared_class: class == 1,
        expires_at: u64::from_le_bytes(*expires_at),
        ttl: u64::from_le_bytes(*ttl),
        filed_at: u64::from_le_bytes(*filed_at),
    };
    (format == FORMAT && class <= 1).then_some((header, value))
}

fn checksum(key: &[u8], content: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(key);
    hasher.update(content);
    hasher.finalize()
}

#[cfg(any(test, fuzzing))]
pub(super) fn encode(key: &[u8], header: Header, value: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode_into(key, header, value, &mut bytes);
    bytes
}

#[cfg(test)]
pub(super) fn from_hex(hex: &str) -> Vec<u8> {
    let digits = hex.as_bytes().chunks(2);
    let byte = |pair| u8::from_str_radix(std::str::from_utf8(pair).expect("hex"), 16).expect("hex");
    digits.map(byte).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::{HitLog, WindowCount};
    use crate::vault::codec;
    use proptest::prelude::*;

    /// What format 1 must decode to, for as long as it is read.
    #[test]
    fn the_fixture_of_format_1_decodes() {
        let fixture = include_str!("../../tests/fixtures/rows-1.txt");
        let mut lines = 0;
        for line in fixture.lines().filter(|line| !line.starts_with('#')) {
            let fields: Vec<&str> = line.split('\t').collect();
            let &[kind, key, row, shared, expires_at, ttl, filed_at, value] = &fields[..] else {
                panic!("{line}");
            };
            let (key, row) = (from_hex(key), from_hex(row));
            let number = |text: &str| text.parse::<u64>().expect(line);
            let expected = Header {
                in_shared_class: shared == "1",
                expires_at: number(expires_at),
                ttl: number(ttl),
                filed_at: number(filed_at),
            };
            let (header, bytes) = decode(&key, &row).expect(line);
            assert_eq!(header, expected);
            assert_eq!(encode(&key, header, bytes), row);
            let numbers: Vec<u64> = value.split_whitespace().map(number).collect();
            let reencoded = match kind {
                "sliding-log/1" => {
                    let log: HitLog = codec::decode(bytes).expect(line);
                    let times: Vec<u64> = log.times().map(|hit| hit.as_millis()).collect();
                    assert_eq!(times, numbers);
                    codec::encode(&log)
                }
                "fixed-window/1" => {
                    let count: WindowCount = codec::decode(bytes).expect(line);
                    assert_eq!(
                        [count.start().as_millis(), count.used().into()],
                        numbers[..]
                    );
                    codec::encode(&count)
                }
                other => panic!("{other}"),
            };
            assert_eq!(reencoded.expect(line), bytes);
            lines += 1;
        }
        assert_eq!(lines, 6);
    }

    proptest! {
        #[test]
        fn a_changed_byte_is_seen(
            key in prop::collection::vec(any::<u8>(), 1..40),
            value in prop::collection::vec(any::<u8>(), 0..40),
            (expires_at, ttl, filed_at) in any::<(u64, u64, u64)>(),
            in_shared_class: bool,
            (position, flip) in (any::<prop::sample::Index>(), 1_u8..),
        ) {
            let header = Header { in_shared_class, expires_at, ttl, filed_at };
            let row = encode(&key, header, &value);
            prop_assert_eq!(decode(&key, &row), Some((header, &value[..])));

            let mut changed = row.clone();
            changed[position.index(row.len())] ^= flip;
            prop_assert_eq!(decode(&key, &changed), None);

            let mut other = key.clone();
            other[position.index(key.len())] ^= flip;
            prop_assert_eq!(decode(&other, &row), None);
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = (decode(&[], &bytes), guess_header(&bytes));
        }
    }
}
