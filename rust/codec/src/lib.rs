//! Records outside of memory: [`frame`] is their self-contained form, [`coder`] what may be done to their payload:
//! [`lossless`] codes the exponents, [`cachegen`] predicts, rotates and quantises with trained [`tables`]; both end in
//! [`rans`].

#![deny(unsafe_code)]

pub mod cachegen;
pub mod coder;
mod elements;
pub mod frame;
mod linear;
pub mod lossless;
pub mod rans;
mod rotary;
pub mod tables;

pub use cachegen::Cachegen;
pub use coder::{Codec, CodecError, Coder, Raw};
pub use elements::Element;
pub use frame::{Frame, FrameError, Head, Header, Parts};
pub use lossless::Lossless;
pub use tables::Tables;
