//! An S3-compatible object store as a tier: one object is one record, `PREFIX/blendstore/1/ab/abcd…` names it.
//!
//! Requests of one call are under way at once, each on a connection of its own, and their answers are taken in turn: a payload
//! is read to where it will stay. The client talks to the endpoint and to nobody else: it follows no redirect and no proxy
//! variable and asks no credentials service.

mod sign;

use std::collections::VecDeque;
use std::env;
use std::io::{self, ErrorKind, IoSlice};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use blendstore_codec::Frame;
use blendstore_codec::frame::FIXED;
use rustls::ClientConfig;

use self::sign::{Credentials, UNSIGNED, Unsigned, encoded, sha256};
use super::breaker::{Breaker, Turn};
use super::chance::Pauses;
use super::delivery::{Delivery, deliver, is_of};
use super::fault::Fault;
use super::http::{self, Response};
use super::tls;
use super::url::{Address, Endpoint, ObjectsUrl, Signer, TlsFiles};
use super::wire::{Place, Wire};
use crate::meter::{Meter, TierStats};
use crate::tier::{Key, Sink, Tier};

/// Requests under way at once in one call, and connections kept for later.
const AT_ONCE: usize = 8;
/// Tries of one request, the first included.
const TRIES: u32 = 3;
/// Pause before the second try; each later one is twice as long.
const PAUSE: Duration = Duration::from_millis(20);
/// Longest body that is no record: a page of names, an error.
const TEXT: u64 = 4 << 20;
/// Longest time that clearing takes.
const CLEARING: Duration = Duration::from_secs(60);
const NAME: &str = "s3";

/// A tier on an object store.
#[derive(Debug)]
pub struct Objects {
    place: Place,
    tls: Option<Arc<ClientConfig>>,
    /// As the signature has it.
    host: String,
    /// Encoded, before every object's name.
    path: String,
    /// Of every object's name, decoded.
    root: String,
    region: String,
    credentials: Option<Credentials>,
    timeout: Duration,
    idle: Mutex<Vec<Wire>>,
    breaker: Breaker,
    meter: Meter,
    pauses: Pauses,
    closed: AtomicBool,
}

/// One request.
struct Request<'a> {
    method: &'static str,
    /// Decoded name of the object, or nothing for the bucket.
    object: String,
    query: String,
    range: Option<String>,
    body: [IoSlice<'a>; 2],
}

impl Request<'_> {
    fn of(method: &'static str, object: String) -> Self {
        let body = [IoSlice::new(b""), IoSlice::new(b"")];
        Self {
            method,
            object,
            query: String::new(),
            range: None,
            body,
        }
    }
}

impl Objects {
    /// Doesn't connect yet. The error names what is missing.
    pub fn open(url: &ObjectsUrl, timeout: Duration) -> Result<Self, String> {
        let credentials = match &url.signer {
            Signer::Given(id, secret) => Some(Credentials {
                id: id.clone(),
                secret: secret.clone(),
                token: None,
            }),
            Signer::Environment => Some(from_environment(|name| env::var(name).ok())?),
            Signer::Anonymous => None,
        };
        let amazon = |host: String| Endpoint {
            tls: true,
            address: Address { host, port: 443 },
        };
        let by_path = format!("/{}", url.bucket);
        let (endpoint, path) = match &url.endpoint {
            Some(endpoint) => (endpoint.clone(), by_path),
            // A certificate for *.s3 names no bucket with a dot.
            None if url.bucket.contains('.') => {
                (amazon(format!("s3.{}.amazonaws.com", url.region)), by_path)
            }
            None => (
                amazon(format!("{}.s3.{}.amazonaws.com", url.bucket, url.region)),
                String::new(),
            ),
        };
        let tls = if endpoint.tls {
            Some(tls::client(&TlsFiles {
                authorities: url.authorities.clone(),
                identity: None,
            })?)
        } else if url.authorities.is_some() {
            return Err("option ca belongs to an endpoint with https://".into());
        } else {
            None
        };
        let usual = if endpoint.tls { 443 } else { 80 };
        let host = if endpoint.address.port == usual {
            endpoint
                .address
                .to_string()
                .trim_end_matches(&format!(":{usual}"))
                .to_string()
        } else {
            endpoint.address.to_string()
        };
        let root = if url.prefix.is_empty() {
            String::new()
        } else {
            format!("{}/", url.prefix)
        };
        Ok(Self {
            place: Place::Address(endpoint.address),
            tls,
            host,
            path,
            root: format!("{root}blendstore/1/"),
            region: url.region.clone(),
            credentials,
            timeout,
            idle: Mutex::default(),
            breaker: Breaker::default(),
            meter: Meter::default(),
            pauses: Pauses::new(PAUSE),
            closed: AtomicBool::new(false),
        })
    }

    fn object_of(&self, key: &Key) -> String {
        let digits: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{}{}/{digits}", self.root, &digits[..2])
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Wire>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn connection(&self, deadline: Instant) -> Result<Wire, Fault> {
        loop {
            let idle = self.idle().pop();
            match idle {
                Some(wire) if wire.is_stale() => {}
                Some(mut wire) => {
                    wire.set_deadline(deadline);
                    return Ok(wire);
                }
                None => {
                    return Wire::connect(&self.place, self.tls.as_ref(), deadline)
                        .map_err(Fault::Connect);
                }
            }
        }
    }

    fn send(&self, request: &Request<'_>, deadline: Instant) -> Result<Wire, Fault> {
        let mut wire = self.connection(deadline)?;
        let path = format!("{}/{}", self.path, encoded(&request.object, true));
        let length: usize = request.body.iter().map(|part| part.len()).sum();
        // Without TLS the signature protects the body too.
        let hash = if self.tls.is_some() {
            UNSIGNED.to_string()
        } else {
            sha256(&[&request.body[0], &request.body[1]])
        };
        let unsigned = Unsigned {
            method: request.method,
            host: &self.host,
            path: &path,
            query: &request.query,
            range: request.range.as_deref(),
            hash: &hash,
        };
        let mut headers = sign::headers(
            &unsigned,
            self.credentials.as_ref(),
            &self.region,
            SystemTime::now(),
        );
        if request.method == "PUT" {
            headers.push_str(&format!("content-length: {length}\r\n"));
        }
        let target = if request.query.is_empty() {
            path
        } else {
            format!("{path}?{}", request.query)
        };
        http::send(&mut wire, request.method, &target, &headers, request.body)?;
        Ok(wire)
    }

    /// Reads an answer; `take` gets the body of a good one, and gives false when it left some of it in the connection.
    fn receive(
        &self,
        method: &str,
        mut wire: Wire,
        take: impl FnOnce(&mut Wire, &Response) -> io::Result<bool>,
    ) -> Result<(), Fault> {
        let response = http::response(&mut wire, method)?;
        let whole = match response.status {
            200..=299 => take(&mut wire, &response)?,
            404 => {
                http::body(&mut wire, &response, TEXT)?;
                true
            }
            status => {
                let text =
                    String::from_utf8_lossy(&http::body(&mut wire, &response, TEXT)?).into_owned();
                let code = between(&text, "<Code>", "</Code>")
                    .filter(|code| code.bytes().all(|b| b.is_ascii_alphanumeric()));
                let said = format!("{status} {}", code.unwrap_or(""));
                return Err(match status {
                    401 | 403 => Fault::Login(said),
                    408 | 429 | 500..=599 => Fault::Busy(said),
                    _ => Fault::Refused(said),
                });
            }
        };
        let mut idle = self.idle();
        if whole && response.keeps && idle.len() < AT_ONCE {
            idle.push(wire);
        }
        Ok(())
    }

    /// Sends `count` requests, up to `at_once` before the first answer is taken, and repeats what is worth it while there is
    /// time. `take` gets the body of each good answer.
    fn each<'a>(
        &self,
        count: usize,
        at_once: usize,
        time: Duration,
        request: impl Fn(usize) -> Request<'a>,
        mut take: impl FnMut(&mut Wire, &Response, usize) -> io::Result<bool>,
    ) {
        if self.closed.load(Relaxed) || count == 0 {
            return;
        }
        let Some(pass) = self.breaker.pass(Instant::now()) else {
            return;
        };
        let end = Instant::now() + time;
        let mut wanted: VecDeque<usize> = (0..count).collect();
        let (mut answered, mut failed) = (false, false);
        for attempt in 0..TRIES {
            if wanted.is_empty() || !self.pauses.before(attempt, end) {
                break;
            }
            let mut again = VecDeque::new();
            let mut flying: VecDeque<(usize, Wire)> = VecDeque::new();
            let mut fault = |index: usize, fault: Fault, again: &mut VecDeque<usize>| {
                self.meter
                    .error(NAME, fault.kind(), format_args!("{}: {fault}", self.host));
                failed |= !matches!(fault, Fault::Refused(_));
                if fault.is_passing() {
                    again.push_back(index);
                }
                matches!(fault, Fault::Refused(_))
            };
            let mut goes_on = true;
            loop {
                while goes_on && flying.len() < at_once && !wanted.is_empty() {
                    let index = wanted.pop_front().expect("not empty");
                    match self.send(&request(index), end.min(Instant::now() + self.timeout)) {
                        Ok(wire) => flying.push_back((index, wire)),
                        Err(error) => goes_on = fault(index, error, &mut again),
                    }
                }
                let Some((index, wire)) = flying.pop_front() else {
                    break;
                };
                let method = request(index).method;
                match self.receive(method, wire, |wire, response| take(wire, response, index)) {
                    Ok(()) => answered = true,
                    Err(error) => goes_on &= fault(index, error, &mut again),
                }
            }
            if !goes_on {
                self.idle().clear();
            }
            wanted.append(&mut again);
        }
        let turn = if failed && !answered {
            pass.failed()
        } else {
            pass.succeeded()
        };
        match turn {
            Turn::None => {}
            Turn::Off => self.meter.error(
                NAME,
                "off",
                format_args!("{}: left alone for a while", self.host),
            ),
            Turn::On => log::info!("tier {NAME}: {}: back", self.host),
        }
    }

    /// Names of our objects, page by page.
    fn names(&self, end: Instant) -> Vec<String> {
        let (mut names, mut next) = (Vec::new(), String::new());
        loop {
            let mut page = String::new();
            let prefix = encoded(&self.root, false);
            let token = if next.is_empty() {
                String::new()
            } else {
                format!("continuation-token={}&", encoded(&next, false))
            };
            let query = format!("{token}list-type=2&prefix={prefix}");
            let request = |_| Request {
                query: query.clone(),
                ..Request::of("GET", String::new())
            };
            self.each(1, 1, self.timeout, request, |wire, response, _| {
                page = String::from_utf8_lossy(&http::body(wire, response, TEXT)?).into_owned();
                Ok(true)
            });
            // Our own names need no decoding; what does is not ours.
            let ours = |name: &&str| name.strip_prefix(&self.root).is_some_and(is_digits);
            names.extend(
                page.split("<Key>")
                    .skip(1)
                    .filter_map(|rest| rest.split("</Key>").next())
                    .filter(ours)
                    .map(String::from),
            );
            match between(&page, "<NextContinuationToken>", "</NextContinuationToken>") {
                Some(token) if Instant::now() < end => next = token.replace("&amp;", "&"),
                _ => return names,
            }
        }
    }

    fn bad(&self, kind: &'static str, key: &Key, why: impl std::fmt::Display) {
        self.meter
            .error(NAME, kind, format_args!("{}: {why}", self.object_of(key)));
    }
}

impl Tier for Objects {
    fn name(&self) -> &str {
        NAME
    }

    fn contains(&self, keys: &[Key]) -> Vec<u8> {
        let mut found = vec![0; keys.len()];
        let request = |index: usize| Request::of("HEAD", self.object_of(&keys[index]));
        self.each(keys.len(), AT_ONCE, self.timeout, request, |_, _, index| {
            found[index] = 1;
            Ok(true)
        });
        found
    }

    fn get(&self, keys: &[Key], sink: &mut dyn Sink) {
        let since = Instant::now();
        let (mut hits, mut read) = (0, 0);
        let request = |index: usize| Request::of("GET", self.object_of(&keys[index]));
        self.each(
            keys.len(),
            AT_ONCE,
            self.timeout,
            request,
            |wire, response, index| {
                let Some(length) = response.length else {
                    return Err(io::Error::new(
                        ErrorKind::InvalidData,
                        "an object without a length",
                    ));
                };
                match deliver(wire, length, &keys[index], index, sink)? {
                    Delivery::Taken => {
                        hits += 1;
                        read += length;
                        Ok(true)
                    }
                    // Cheaper to give the connection up than to read what nobody wants.
                    Delivery::Unwanted(left) => Ok(left == 0),
                    Delivery::Bad(kind, why, left) => {
                        self.bad(kind, &keys[index], why);
                        Ok(left == 0)
                    }
                }
            },
        );
        self.meter.got(keys.len(), hits, read, since);
    }

    fn put(&self, frames: &[Frame<'_>]) -> usize {
        let since = Instant::now();
        let (mut stored, mut written) = (0, 0);
        let whole = self.timeout * u32::try_from(frames.len().max(1)).unwrap_or(u32::MAX);
        let request = |index: usize| {
            let frame = &frames[index];
            Request {
                body: frame.slices(),
                ..Request::of("PUT", self.object_of(&frame.head.header.key))
            }
        };
        // One after the other: each has its time, and nobody waits.
        self.each(frames.len(), 1, whole, request, |wire, response, index| {
            http::body(wire, response, TEXT)?;
            stored += 1;
            written += frames[index].len() as u64;
            Ok(true)
        });
        self.meter.put(frames.len(), stored, written, since);
        stored
    }

    fn remove(&self, keys: &[Key]) {
        let request = |index: usize| Request::of("DELETE", self.object_of(&keys[index]));
        self.each(
            keys.len(),
            AT_ONCE,
            self.timeout,
            request,
            |wire, response, _| http::body(wire, response, TEXT).map(|_| true),
        );
    }

    fn clear(&self, namespace: Option<&Key>) {
        let end = Instant::now() + CLEARING;
        let names = self.names(end);
        for names in names.chunks(64) {
            if Instant::now() >= end {
                return;
            }
            let mut ours: Vec<&String> = names.iter().collect();
            if let Some(namespace) = namespace {
                let mut marked = vec![false; names.len()];
                let range = format!("bytes=0-{}", FIXED - 1);
                let request = |index: usize| Request {
                    range: Some(range.clone()),
                    ..Request::of("GET", names[index].clone())
                };
                self.each(
                    names.len(),
                    AT_ONCE,
                    self.timeout,
                    request,
                    |wire, response, index| {
                        marked[index] = is_of(namespace, &http::body(wire, response, TEXT)?);
                        Ok(true)
                    },
                );
                let mut marked = marked.into_iter();
                ours.retain(|_| marked.next().unwrap_or(false));
            }
            let request = |index: usize| Request::of("DELETE", ours[index].clone());
            self.each(
                ours.len(),
                AT_ONCE,
                self.timeout,
                request,
                |wire, response, _| http::body(wire, response, TEXT).map(|_| true),
            );
        }
    }

    fn stats(&self) -> TierStats {
        self.meter.stats()
    }

    fn close(&self) {
        self.closed.store(true, Relaxed);
        self.idle().clear();
    }
}

/// `ab/abcd…`
fn is_digits(name: &str) -> bool {
    name.split_once('/').is_some_and(|(folder, digits)| {
        digits.len() == 64
            && digits.starts_with(folder)
            && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
    })
}

fn between<'a>(text: &'a str, start: &str, end: &str) -> Option<&'a str> {
    text.split_once(start)?
        .1
        .split_once(end)
        .map(|(inner, _)| inner)
}

/// The access key of the environment, and nothing else of it.
fn from_environment(variable: impl Fn(&str) -> Option<String>) -> Result<Credentials, String> {
    let given = |name: &str| variable(name).filter(|value| !value.is_empty());
    match (given("AWS_ACCESS_KEY_ID"), given("AWS_SECRET_ACCESS_KEY")) {
        (Some(id), Some(secret)) => {
            let token = given("AWS_SESSION_TOKEN").map(super::url::Secret::new);
            Ok(Credentials { id, secret: super::url::Secret::new(secret), token })
        }
        _ => Err("no access key: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give s3://id:secret@bucket, or option \
             credentials=anonymous"
            .into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_keys_come_from_the_environment_as_a_whole() {
        let variables = |names: &'static [&str]| {
            move |name: &str| names.contains(&name).then(|| format!("{name} value"))
        };
        let all = from_environment(variables(&[
            "AWS_ACCESS_KEY_ID",
            "AWS_SECRET_ACCESS_KEY",
            "AWS_SESSION_TOKEN",
        ]))
        .unwrap();
        assert_eq!(all.id, "AWS_ACCESS_KEY_ID value");
        assert_eq!(
            all.token.as_ref().unwrap().reveal(),
            "AWS_SESSION_TOKEN value"
        );
        assert!(!format!("{all:?}").contains("SECRET_ACCESS_KEY value"));
        for half in [&["AWS_ACCESS_KEY_ID"][..], &["AWS_SECRET_ACCESS_KEY"], &[]] {
            assert!(
                from_environment(variables(half))
                    .unwrap_err()
                    .contains("AWS_SECRET_ACCESS_KEY")
            );
        }
    }
}
