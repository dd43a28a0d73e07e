//! Codings of a record's payload: what lies in memory on one side, what travels to lower tiers on the other.

use std::fmt;

use crate::frame::Header;

/// Number of a coding, as it stands in a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Codec(pub u16);

impl Codec {
    /// As in memory.
    pub const RAW: Self = Self(0);
    /// Bit-exact, smaller.
    pub const LOSSLESS: Self = Self(1);
    /// Quantised and entropy-coded.
    pub const CACHEGEN: Self = Self(2);
}

/// Most payload bytes in memory for one coded byte: a decoder asks for no more room than that, and an encoder that would do
/// better than that leaves the payload [`Codec::RAW`].
pub const MAX_EXPANSION: u64 = 1024;

/// A payload that can't be coded, or bytes that are no coded payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CodecError(pub String);

impl fmt::Display for CodecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for CodecError {}

/// One coding. Both directions are pure: the same bytes on every machine, whatever SIMD it has.
pub trait Coder: Send + Sync + fmt::Debug {
    /// What its frames are marked with.
    fn codec(&self) -> Codec;

    /// Appends the coded payload of a record to `coded`. `params` is the memory format's parameter block. After an error the
    /// caller stores the payload raw, and cuts off what was appended.
    fn encode(
        &self,
        header: &Header,
        params: &[u8],
        payload: &[u8],
        coded: &mut Vec<u8>,
    ) -> Result<(), CodecError>;

    /// Fills `payload` ([`Header::raw_len`] bytes) from `coded`. The bytes may be anybody's: no panic, no read beyond them, no
    /// allocation beyond the scale of both slices. After an error the content of `payload` is undefined.
    fn decode(
        &self,
        header: &Header,
        params: &[u8],
        coded: &[u8],
        payload: &mut [u8],
    ) -> Result<(), CodecError>;
}

/// The payload as it is.
#[derive(Clone, Copy, Debug, Default)]
pub struct Raw;

impl Coder for Raw {
    fn codec(&self) -> Codec {
        Codec::RAW
    }

    fn encode(
        &self,
        _header: &Header,
        _params: &[u8],
        payload: &[u8],
        coded: &mut Vec<u8>,
    ) -> Result<(), CodecError> {
        coded.extend_from_slice(payload);
        Ok(())
    }

    fn decode(
        &self,
        _header: &Header,
        _params: &[u8],
        coded: &[u8],
        payload: &mut [u8],
    ) -> Result<(), CodecError> {
        if coded.len() != payload.len() {
            return Err(CodecError(format!(
                "{} raw bytes where {} belong",
                coded.len(),
                payload.len()
            )));
        }
        payload.copy_from_slice(coded);
        Ok(())
    }
}
