//! The one module that knows bincode: values to bytes and back.
//!
//! Configuration: little endian, variable-length integers, at most [`LARGEST_VALUE`] bytes. bincode
//! counts that limit in decoded widths (eight bytes for a `u64`, however short its encoding), so
//! it also bounds what decoding allocates. Keys are never encoded here.

use bincode::config::{Configuration, Limit, LittleEndian, Varint, standard};
use bincode::enc::write::Writer;
use bincode::error::EncodeError;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::Cause;

/// The largest value, in decoded bytes: a log of 100,000 hits takes 800,008.
const LARGEST_VALUE: usize = 1 << 20;

const CONFIG: Configuration<LittleEndian, Varint, Limit<LARGEST_VALUE>> =
    standard().with_limit::<LARGEST_VALUE>();

/// No encoding is shorter than its decoded width by more than this: a `u128` may take one byte.
const LARGEST_GAIN: usize = 16;

/// The bytes of `value`, if [`decode`] will take them back.
pub(super) fn encode<V: Serialize + DeserializeOwned>(value: &V) -> Result<Vec<u8>, Cause> {
    let mut bytes = Vec::new();
    encode_into(value, &mut bytes)?;
    Ok(bytes)
}

/// Appends the bytes of `value` to `bytes`, if [`decode`] will take them back.
pub(super) fn encode_into<V: Serialize + DeserializeOwned>(
    value: &V,
    bytes: &mut Vec<u8>,
) -> Result<(), Cause> {
    let start = bytes.len();
    bincode::serde::encode_into_writer(value, Appended(bytes), CONFIG).map_err(Cause::new)?;
    let encoded = bytes.get(start..).unwrap_or_default();
    // Encoding knows no limit, so a value that may be too large is decoded once to see.
    if encoded.len() > LARGEST_VALUE / LARGEST_GAIN && decode::<V>(encoded).is_none() {
        return Err(Cause::new(format!(
            "its {} bytes decode to more than {LARGEST_VALUE}",
            encoded.len()
        )));
    }
    Ok(())
}

/// A writer that appends to what is there.
struct Appended<'b>(&'b mut Vec<u8>);

impl Writer for Appended<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<(), EncodeError> {
        self.0.extend_from_slice(bytes);
        Ok(())
    }
}

/// The value that `bytes` encode, all of them.
pub(crate) fn decode<V: DeserializeOwned>(bytes: &[u8]) -> Option<V> {
    let (value, consumed) = bincode::serde::decode_from_slice(bytes, CONFIG).ok()?;
    (consumed == bytes.len()).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trailing_bytes_are_an_error() {
        let bytes = encode(&(7_u64, 300_u32)).expect("encodes");
        assert_eq!(decode::<(u64, u32)>(&bytes), Some((7, 300)));
        assert_eq!(decode::<(u64, u32)>(&[&bytes[..], &[0]].concat()), None);
        assert_eq!(decode::<(u64, u32)>(&bytes[..bytes.len() - 1]), None);
    }

    #[test]
    fn a_claimed_length_does_not_allocate() {
        let claims_everything = [253, 255, 255, 255, 255, 255, 255, 255, 127];
        assert_eq!(decode::<Vec<u64>>(&claims_everything), None);
        assert_eq!(decode::<String>(&claims_everything), None);
    }

    #[test]
    fn the_largest_log_fits() {
        let times: Vec<u64> = (0..100_000).map(|n| n * 60_000).collect();
        let bytes = encode(&times).expect("encodes");
        assert_eq!(decode::<Vec<u64>>(&bytes), Some(times));
    }

    #[test]
    fn a_value_that_is_too_large_is_refused_when_it_is_written() {
        assert!(encode(&vec![0_u8; LARGEST_VALUE + 1]).is_err());
        // 200,000 bytes, but 1.6 million once decoded.
        assert!(encode(&vec![1_u64; 200_000]).is_err());
        assert!(encode(&vec![1_u64; 131_071]).is_ok());
        assert!(encode(&vec![1_u128; 65_600]).is_err());
    }
}
