//! Records outside of memory: [`frame`] is their self-contained form, [`coder`] what may be done to their payload.

#![forbid(unsafe_code)]

pub mod coder;
pub mod frame;

pub use coder::{Codec, CodecError, Coder, Raw};
pub use frame::{Frame, FrameError, Head, Header, Parts};
