//! Errors of the store: wrong use only. A miss is a value, never an error.

use std::fmt;

/// What can be wrong with a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// An argument has a value that the call can't take.
    Argument {
        /// Name of the argument.
        name: &'static str,
        /// Its value, as text.
        value: String,
        /// What is accepted.
        accepted: String,
    },
    /// The lease was released, or its time-out ran out, before its bytes were read.
    LeaseExpired,
    /// The store was closed.
    Closed,
    /// The operating system gave no address space for the arena.
    NoMemory {
        /// Bytes asked for.
        bytes: usize,
        /// The system's message.
        reason: String,
    },
}

/// Result of a call that can be used wrongly.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn argument(
        name: &'static str,
        value: impl fmt::Display,
        accepted: impl Into<String>,
    ) -> Self {
        Self::Argument {
            name,
            value: value.to_string(),
            accepted: accepted.into(),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Argument { name, value, accepted } => write!(f, "{name} = {value} is not accepted: {accepted}"),
            Self::LeaseExpired => f.write_str(
                "the lease was released or timed out before its bytes were read: look the keys up again, or raise \
                 lease_timeout_s",
            ),
            Self::Closed => f.write_str("the store is closed: open a new one"),
            Self::NoMemory { bytes, reason } => {
                write!(f, "capacity_bytes = {bytes} can't be mapped ({reason}): ask for less")
            }
        }
    }
}

impl std::error::Error for Error {}
