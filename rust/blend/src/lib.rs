//! What blending computes on a CPU in one piece, where tensor operations would go over memory many times or far below the
//! processor's speed: [`attention`] and [`rows`].
//!
//! Everything here has a reference in the Python package, in plain torch, and works on its memory in place.

#![deny(unsafe_code)]

pub mod attention;
mod power;
pub mod rotation;
pub mod rows;
mod share;

pub use share::settle;

use std::fmt;

/// An argument with a value that can't be taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The argument.
    pub name: &'static str,
    /// What it was.
    pub value: String,
    /// What it may be.
    pub accepted: String,
}

impl Refused {
    fn new(name: &'static str, value: impl fmt::Display, accepted: impl Into<String>) -> Self {
        Self {
            name,
            value: value.to_string(),
            accepted: accepted.into(),
        }
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: use {}", self.name, self.value, self.accepted)
    }
}

impl std::error::Error for Refused {}
