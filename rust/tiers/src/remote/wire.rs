//! One connection: TCP, TLS or a Unix socket, every operation of which ends by a deadline.

use std::fmt;
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection};

use super::url::Address;

/// Bytes read ahead: replies without their bulk, and heads of records.
const AHEAD: usize = 16 << 10;

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Place {
    Address(Address),
    Socket(PathBuf),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Socket(path) => path.display().fmt(f),
        }
    }
}

/// A byte stream whose reads and writes fail with `TimedOut` once the deadline has passed, however slowly bytes trickle.
pub(super) struct Wire {
    stream: Stream,
    ahead: Box<[u8]>,
    start: usize,
    end: usize,
    deadline: Instant,
}

enum Stream {
    Tcp(TcpStream),
    Tls(Box<ClientConnection>, TcpStream),
    Unix(UnixStream),
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wire").finish_non_exhaustive()
    }
}

impl Wire {
    /// Connects; with `tls` the handshake is part of it.
    pub fn connect(
        place: &Place,
        tls: Option<&Arc<ClientConfig>>,
        deadline: Instant,
    ) -> io::Result<Self> {
        let stream = match place {
            // The kernel lets a connect wait for a server that accepts nobody.
            Place::Socket(path) => {
                let path = path.clone();
                Stream::Unix(within(deadline, move || UnixStream::connect(path))?)
            }
            Place::Address(address) => {
                let tcp = connect_tcp(address, deadline)?;
                tcp.set_nodelay(true)?;
                match tls {
                    None => Stream::Tcp(tcp),
                    Some(config) => {
                        let name = ServerName::try_from(address.host.clone())
                            .map_err(|error| io::Error::new(ErrorKind::InvalidInput, error))?;
                        let session =
                            ClientConnection::new(config.clone(), name).map_err(tls_error)?;
                        Stream::Tls(Box::new(session), tcp)
                    }
                }
            }
        };
        let mut wire = Self::over(stream, deadline);
        wire.stream.handshake(deadline)?;
        Ok(wire)
    }

    fn over(stream: Stream, deadline: Instant) -> Self {
        Self {
            stream,
            ahead: vec![0; AHEAD].into(),
            start: 0,
            end: 0,
            deadline,
        }
    }

    /// Whose peer says `bytes` and no more.
    #[cfg(test)]
    pub fn that_says(bytes: &[u8]) -> Self {
        let (mut peer, ours) = UnixStream::pair().unwrap();
        let bytes = bytes.to_vec();
        // The reader may leave before all has been said.
        std::thread::spawn(move || drop(peer.write_all(&bytes)));
        Self::over(Stream::Unix(ours), Instant::now() + Duration::from_secs(60))
    }

    /// From now on everything ends by then.
    pub fn set_deadline(&mut self, deadline: Instant) {
        self.deadline = deadline;
    }

    /// Whether the peer has closed the connection, or sent what nobody asked for.
    pub fn is_stale(&self) -> bool {
        let peek = |stream: &TcpStream| -> io::Result<usize> {
            stream.set_nonblocking(true)?;
            let seen = stream.peek(&mut [0]);
            stream.set_nonblocking(false)?;
            seen
        };
        match &self.stream {
            _ if self.start != self.end => true,
            Stream::Tcp(stream) => {
                !matches!(peek(stream), Err(error) if error.kind() == ErrorKind::WouldBlock)
            }
            // A TLS server may send session tickets at any time.
            Stream::Tls(_, stream) => matches!(peek(stream), Ok(0)),
            // There is no such call for it; what is closed is found out by using it, and the call is repeated.
            Stream::Unix(_) => false,
        }
    }

    /// Fills `into`.
    pub fn read_exact(&mut self, mut into: &mut [u8]) -> io::Result<()> {
        while !into.is_empty() {
            if self.start == self.end && into.len() >= AHEAD {
                let read = self.stream.read_some(self.deadline, into)?;
                into = &mut into[read..];
                continue;
            }
            let known = self.fill()?;
            let taken = known.len().min(into.len());
            into[..taken].copy_from_slice(&known[..taken]);
            self.start += taken;
            into = &mut into[taken..];
        }
        Ok(())
    }

    /// Reads `count` bytes and forgets them.
    pub fn skip(&mut self, mut count: u64) -> io::Result<()> {
        while count > 0 {
            let known = self
                .fill()?
                .len()
                .min(usize::try_from(count).unwrap_or(usize::MAX));
            self.start += known;
            count -= known as u64;
        }
        Ok(())
    }

    /// A line that ends with CR LF, without these, of at most `most` bytes.
    pub fn read_line(&mut self, most: usize) -> io::Result<Vec<u8>> {
        let mut line = Vec::new();
        loop {
            let known = self.fill()?;
            let (taken, whole) = match known.iter().position(|&byte| byte == b'\n') {
                Some(at) => (at + 1, true),
                None => (known.len(), false),
            };
            line.extend_from_slice(&known[..taken]);
            self.start += taken;
            if line.len() > most {
                return Err(io::Error::new(
                    ErrorKind::InvalidData,
                    "a line that does not end",
                ));
            }
            if whole {
                return match line.strip_suffix(b"\r\n") {
                    Some(text) => Ok(text.to_vec()),
                    None => Err(io::Error::new(ErrorKind::InvalidData, "a line without CR")),
                };
            }
        }
    }

    /// What has been read ahead, at least a byte.
    fn fill(&mut self) -> io::Result<&[u8]> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
            self.end = self.stream.read_some(self.deadline, &mut self.ahead)?;
        }
        Ok(&self.ahead[self.start..self.end])
    }

    /// Writes all of it.
    pub fn write_all(&mut self, parts: &mut [IoSlice<'_>]) -> io::Result<()> {
        let mut rest = parts;
        IoSlice::advance_slices(&mut rest, 0);
        while !rest.is_empty() {
            let written = self.stream.write_some(self.deadline, rest)?;
            IoSlice::advance_slices(&mut rest, written);
        }
        self.stream.flush(self.deadline)
    }
}

impl Stream {
    /// Limits the next read of the socket to what is left.
    fn before_read(&self, deadline: Instant) -> io::Result<()> {
        let left = Some(left(deadline)?);
        match self {
            Self::Tcp(stream) | Self::Tls(_, stream) => stream.set_read_timeout(left),
            Self::Unix(stream) => stream.set_read_timeout(left),
        }
    }

    /// Limits the next write to what is left.
    fn before_write(&self, deadline: Instant) -> io::Result<()> {
        let left = Some(left(deadline)?);
        match self {
            Self::Tcp(stream) | Self::Tls(_, stream) => stream.set_write_timeout(left),
            Self::Unix(stream) => stream.set_write_timeout(left),
        }
    }

    /// One read of at least a byte. `into` is not empty.
    fn read_some(&mut self, deadline: Instant, into: &mut [u8]) -> io::Result<usize> {
        loop {
            self.before_read(deadline)?;
            let read = match self {
                Self::Tcp(stream) => stream.read(into),
                Self::Unix(stream) => stream.read(into),
                Self::Tls(session, stream) => match session.reader().read(into) {
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {
                        receive(session, stream)?;
                        continue;
                    }
                    read => read,
                },
            };
            match read {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Err(error) if is_again(&error) => {}
                read => return read,
            }
        }
    }

    fn write_some(&mut self, deadline: Instant, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        loop {
            self.before_write(deadline)?;
            let written = match self {
                Self::Tcp(stream) => stream.write_vectored(parts),
                Self::Unix(stream) => stream.write_vectored(parts),
                Self::Tls(session, stream) => {
                    if session.wants_write() {
                        send(session, stream)?;
                        continue;
                    }
                    session.writer().write_vectored(parts)
                }
            };
            match written {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Err(error) if is_again(&error) => {}
                written => return written,
            }
        }
    }

    fn flush(&mut self, deadline: Instant) -> io::Result<()> {
        loop {
            self.before_write(deadline)?;
            match self {
                Self::Tls(session, stream) if session.wants_write() => send(session, stream)?,
                _ => return Ok(()),
            }
        }
    }

    fn handshake(&mut self, deadline: Instant) -> io::Result<()> {
        loop {
            self.before_write(deadline)?;
            self.before_read(deadline)?;
            match self {
                Self::Tls(session, stream) if session.wants_write() => send(session, stream)?,
                Self::Tls(session, stream) if session.is_handshaking() => receive(session, stream)?,
                _ => return Ok(()),
            }
        }
    }
}

/// At most one read of the socket.
fn receive(session: &mut ClientConnection, stream: &mut TcpStream) -> io::Result<()> {
    match session.read_tls(stream) {
        Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
        Err(error) if !is_again(&error) => return Err(error),
        _ => {}
    }
    session.process_new_packets().map_err(tls_error)?;
    Ok(())
}

/// At most one write to the socket.
fn send(session: &mut ClientConnection, stream: &mut TcpStream) -> io::Result<()> {
    match session.write_tls(stream) {
        Err(error) if !is_again(&error) => Err(error),
        _ => Ok(()),
    }
}

/// Whether the deadline decides.
fn is_again(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
    )
}

fn tls_error(error: rustls::Error) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, error)
}

fn late() -> io::Error {
    io::Error::new(ErrorKind::TimedOut, "no answer in time")
}

fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        Err(late())
    } else {
        Ok(left)
    }
}

fn connect_tcp(address: &Address, deadline: Instant) -> io::Result<TcpStream> {
    let places = match address.host.parse::<IpAddr>() {
        Ok(number) => vec![SocketAddr::new(number, address.port)],
        // Resolvers have time-outs of their own, longer than ours.
        Err(_) => {
            let target = (address.host.clone(), address.port);
            within(deadline, move || target.to_socket_addrs())?.collect()
        }
    };
    let mut last = io::Error::new(ErrorKind::NotFound, "no such host");
    for (index, place) in places.iter().enumerate() {
        // A name with several addresses leaves time for the later ones.
        let share = left(deadline)? / (places.len() - index) as u32;
        match TcpStream::connect_timeout(place, share.max(Duration::from_millis(1))) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// What `job` gives, unless the deadline passes first; then its thread is left behind.
fn within<T: Send + 'static>(
    deadline: Instant,
    job: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let (sender, receiver) = mpsc::sync_channel(1);
    std::thread::Builder::new()
        .name("blendstore-connect".into())
        .spawn(move || {
            let _ = sender.send(job());
        })?;
    receiver
        .recv_timeout(left(deadline)?)
        .unwrap_or_else(|_| Err(late()))
}
