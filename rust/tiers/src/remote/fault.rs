//! What goes wrong with a remote, in words for counters.

use std::fmt;
use std::io::{self, ErrorKind};

/// Why a remote did not do what it was asked.
#[derive(Debug)]
pub(super) enum Fault {
    /// No connection.
    Connect(io::Error),
    /// The connection broke, or nothing came in time.
    Io(io::Error),
    /// User or password are wrong: the first word of the answer.
    Login(String),
    /// The server answered with an error.
    Refused(String),
    /// It has too much to do.
    Busy(String),
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl Fault {
    /// An answer that the protocol doesn't have.
    pub fn protocol(what: &str) -> Self {
        Self::Io(io::Error::new(ErrorKind::InvalidData, what))
    }

    /// A word for counters.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Connect(error) | Self::Io(error) if error.kind() == ErrorKind::TimedOut => {
                "timeout"
            }
            Self::Connect(_) => "connect",
            Self::Io(error) if error.kind() == ErrorKind::InvalidData => "protocol",
            Self::Io(_) => "closed",
            Self::Login(_) => "login",
            Self::Refused(text) if text.starts_with("OOM") => "full",
            Self::Refused(_) => "refused",
            Self::Busy(_) => "busy",
        }
    }

    /// Whether another try, perhaps of another server, can go better at once.
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Connect(error) | Self::Io(error) => error.kind() != ErrorKind::TimedOut,
            Self::Login(_) => false,
            Self::Refused(text) => is_passing(text),
            Self::Busy(_) => true,
        }
    }
}

/// Whether an error of the server is about its state, not about the command.
pub(super) fn is_passing(text: &str) -> bool {
    [
        "LOADING",
        "TRYAGAIN",
        "CLUSTERDOWN",
        "MASTERDOWN",
        "READONLY",
        "MOVED",
        "ASK",
    ]
    .iter()
    .any(|word| text.split(' ').next() == Some(word))
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect(error) => write!(f, "no connection: {error}"),
            Self::Io(error) => error.fmt(f),
            Self::Login(word) => write!(
                f,
                "login refused ({word}): check user and password of remote_url"
            ),
            Self::Refused(text) | Self::Busy(text) => write!(f, "the server said: {text}"),
        }
    }
}
