//! As much of HTTP/1.1 as an object store needs: requests out, responses in, bounded in every length. Nothing is followed:
//! neither redirects nor proxies.

use std::io::{self, ErrorKind, IoSlice};

use super::wire::Wire;

const LINE: usize = 8 << 10;
const HEADERS: usize = 128;

/// A response whose body is still to be read.
#[derive(Debug)]
pub(super) struct Response {
    pub status: u16,
    /// Bytes of the body; `None` when it comes in pieces.
    pub length: Option<u64>,
    /// Whether the connection can be used again.
    pub keeps: bool,
}

/// Sends a request. `headers` end with CR LF each, and say the length of the body.
pub(super) fn send(
    wire: &mut Wire,
    method: &str,
    target: &str,
    headers: &str,
    body: [IoSlice<'_>; 2],
) -> io::Result<()> {
    let head = format!("{method} {target} HTTP/1.1\r\n{headers}\r\n");
    let [first, second] = body;
    wire.write_all(&mut [IoSlice::new(head.as_bytes()), first, second])
}

/// Reads up to the body. `HEAD` has none, whatever its headers say.
pub(super) fn response(wire: &mut Wire, method: &str) -> io::Result<Response> {
    loop {
        let line = text(wire)?;
        let mut words = line.splitn(3, ' ');
        let version = words.next().unwrap_or("");
        let status: u16 = words
            .next()
            .and_then(|word| word.parse().ok())
            .ok_or_else(|| broken("no status"))?;
        if !version.starts_with("HTTP/1.") {
            return Err(broken("no HTTP/1"));
        }
        let mut response = Response {
            status,
            length: None,
            keeps: version == "HTTP/1.1",
        };
        let mut pieces = false;
        for count in 0.. {
            let line = text(wire)?;
            if line.is_empty() {
                break;
            }
            if count == HEADERS {
                return Err(broken("more headers than any store sends"));
            }
            let (name, value) = line
                .split_once(':')
                .ok_or_else(|| broken("a header without a colon"))?;
            let value = value.trim();
            match name.to_ascii_lowercase().as_str() {
                "content-length" if value.bytes().all(|byte| byte.is_ascii_digit()) => {
                    response.length = Some(
                        value
                            .parse()
                            .map_err(|_| broken("a length beyond numbers"))?,
                    );
                }
                "content-length" => return Err(broken("a length that is no number")),
                "transfer-encoding" => pieces = value.eq_ignore_ascii_case("chunked"),
                "connection" => response.keeps &= !value.eq_ignore_ascii_case("close"),
                _ => {}
            }
        }
        if (100..200).contains(&status) {
            continue;
        }
        if method == "HEAD" || status == 204 || status == 304 {
            response.length = Some(0);
        } else if pieces {
            response.length = None;
        } else if response.length.is_none() {
            return Err(broken("a body of unknown length"));
        }
        return Ok(response);
    }
}

/// The rest of a body, of at most `most` bytes.
pub(super) fn body(wire: &mut Wire, response: &Response, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut take = |wire: &mut Wire, length: u64| {
        if bytes.len() as u64 + length > most {
            return Err(broken("a longer body than this request has"));
        }
        // In steps: memory for what has come, not for what is announced.
        let mut left = length as usize;
        while left > 0 {
            let (from, step) = (bytes.len(), left.min(1 << 20));
            bytes.resize(from + step, 0);
            wire.read_exact(&mut bytes[from..])?;
            left -= step;
        }
        Ok(())
    };
    if let Some(length) = response.length {
        take(wire, length)?;
        return Ok(bytes);
    }
    loop {
        let line = text(wire)?;
        let digits = line.split(';').next().unwrap_or("").trim();
        let length =
            u64::from_str_radix(digits, 16).map_err(|_| broken("a piece without its length"))?;
        if length == 0 {
            // Trailers, up to an empty line.
            for _ in 0..HEADERS {
                if text(wire)?.is_empty() {
                    return Ok(bytes);
                }
            }
            return Err(broken("more trailers than any store sends"));
        }
        take(wire, length)?;
        if !text(wire)?.is_empty() {
            return Err(broken("a piece of another length"));
        }
    }
}

fn text(wire: &mut Wire) -> io::Result<String> {
    String::from_utf8(wire.read_line(LINE)?).map_err(|_| broken("a header that is no text"))
}

fn broken(what: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests;
