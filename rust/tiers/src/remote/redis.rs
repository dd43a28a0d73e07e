//! Redis and Valkey as a tier: one value is one record, `blendstore:1:` and 64 hexadecimal digits name it.
//!
//! Calls are pipelined over pooled connections and end by a deadline. What is safe to repeat is repeated, after a short random
//! pause, while there is time: on a new connection, on the server that a cluster or a sentinel names now. A server that fails
//! three times in a row is left alone for a while ([`super::breaker`]).

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use blendstore_codec::Frame;
use rustls::ClientConfig;

use super::breaker::{Breaker, Turn};
use super::chance::Pauses;
use super::delivery::{Delivery, deliver};
use super::fault::{Fault, is_passing};
use super::nodes::{Node, Nodes, Route};
use super::resp::{self, Reply, Start};
use super::scan;
use super::url::RedisUrl;
use super::wire::Wire;
use crate::meter::{Meter, TierStats};
use crate::tier::{Key, Sink, Tier};

/// Tries of one call, the first included.
const TRIES: u32 = 4;
/// Pause before the second try; each later one is twice as long.
const PAUSE: Duration = Duration::from_millis(10);
/// Commands whose replies may be outstanding: hides the way to the server, and bounds what it holds ready for us.
const WINDOW: usize = 8;
/// Longest time that clearing takes.
const CLEARING: Duration = Duration::from_secs(30);
const NAME: &str = "redis";

/// A tier on Redis or Valkey.
#[derive(Debug)]
pub struct Redis {
    nodes: Nodes,
    /// Of finding out which servers there are.
    discovery: Breaker,
    prefix: Vec<u8>,
    ttl: Option<Duration>,
    timeout: Duration,
    meter: Meter,
    pauses: Pauses,
    closed: AtomicBool,
}

/// What came of one key.
enum Answer {
    /// What it was asked for, or a miss.
    Done,
    /// An error of the server instead.
    Error(String),
    /// It is done, but the connection broke behind it.
    Last(io::Error),
}

/// One key of a call: its index, and the server that a cluster sent it to while its slot moves.
type Wanted = (usize, Option<Arc<Node>>);

/// What a call did at one server: keys to be tried again, whether any was answered, and what broke the connection.
struct Outcome {
    again: Vec<Wanted>,
    answered: bool,
    fault: Option<Fault>,
}

impl Redis {
    /// Doesn't connect yet. `timeout` bounds every call.
    pub fn new(url: RedisUrl, tls: Option<Arc<ClientConfig>>, timeout: Duration) -> Self {
        let colon = if url.prefix.is_empty() { "" } else { ":" };
        Self {
            prefix: format!("{}{colon}blendstore:1:", url.prefix).into_bytes(),
            ttl: url.ttl,
            nodes: Nodes::new(url, tls),
            discovery: Breaker::default(),
            timeout,
            meter: Meter::default(),
            pauses: Pauses::new(PAUSE),
            closed: AtomicBool::new(false),
        }
    }

    /// What a record is called there.
    fn name_of(&self, key: &Key) -> Vec<u8> {
        let mut name = self.prefix.clone();
        for byte in key {
            for digit in [byte >> 4, byte & 15] {
                name.push(b"0123456789abcdef"[digit as usize]);
            }
        }
        name
    }

    fn fault(&self, fault: &Fault, at: Option<&Node>) {
        match at {
            Some(node) => {
                self.meter
                    .error(NAME, fault.kind(), format_args!("{}: {fault}", node.place))
            }
            None => self.meter.error(NAME, fault.kind(), fault),
        }
    }

    fn turned(&self, turn: Turn, node: Option<&Node>) {
        let place = node.map_or_else(|| "discovery".to_string(), |node| node.place.to_string());
        match turn {
            Turn::None => {}
            Turn::Off => {
                self.meter
                    .error(NAME, "off", format_args!("{place}: left alone for a while"))
            }
            Turn::On => log::info!("tier {NAME}: {place}: back"),
        }
    }

    /// Where keys are.
    fn route(&self, deadline: Instant) -> Option<Arc<Route>> {
        let pass = self.discovery.pass(Instant::now())?;
        match self.nodes.route(deadline) {
            Ok(route) => {
                self.turned(pass.succeeded(), None);
                Some(route)
            }
            Err(fault) => {
                self.fault(&fault, None);
                self.turned(pass.failed(), None);
                None
            }
        }
    }

    /// Sends a command for each of the keys named `names` and takes its reply, server by server, and repeats what is left
    /// while that can help.
    fn each(
        &self,
        names: &[Vec<u8>],
        deadline: Instant,
        mut send: impl FnMut(&mut Wire, usize) -> io::Result<()>,
        mut receive: impl FnMut(&mut Wire, usize) -> io::Result<Answer>,
    ) {
        let mut wanted: Vec<Wanted> = (0..names.len()).map(|index| (index, None)).collect();
        for attempt in 0..TRIES {
            if wanted.is_empty()
                || self.closed.load(Relaxed)
                || !self.pauses.before(attempt, deadline)
            {
                return;
            }
            let Some(route) = self.route(deadline) else {
                continue;
            };
            let mut groups: Vec<(Arc<Node>, Vec<Wanted>)> = Vec::new();
            for (index, asked) in wanted.drain(..) {
                let Some(node) = asked.as_ref().or_else(|| route.of(&names[index])).cloned() else {
                    continue;
                };
                match groups
                    .iter_mut()
                    .find(|(known, _)| known.place == node.place)
                {
                    Some((_, group)) => group.push((index, asked)),
                    None => groups.push((node, vec![(index, asked)])),
                }
            }
            for (node, group) in groups {
                wanted.extend(self.at(&node, group, deadline, &mut send, &mut receive));
            }
        }
    }

    /// One server's share. What is returned is worth another try.
    fn at(
        &self,
        node: &Node,
        group: Vec<Wanted>,
        deadline: Instant,
        send: &mut impl FnMut(&mut Wire, usize) -> io::Result<()>,
        receive: &mut impl FnMut(&mut Wire, usize) -> io::Result<Answer>,
    ) -> Vec<Wanted> {
        let Some(pass) = node.breaker.pass(Instant::now()) else {
            return Vec::new();
        };
        let outcome = match self.nodes.connection(node, deadline) {
            Ok(mut wire) => {
                let outcome = self.pipeline(node, &mut wire, group, send, receive);
                if outcome.fault.is_none() {
                    self.nodes.put_back(node, wire);
                }
                outcome
            }
            Err(fault) => Outcome {
                again: group,
                answered: false,
                fault: Some(fault),
            },
        };
        let Some(fault) = outcome.fault else {
            self.turned(pass.succeeded(), Some(node));
            return outcome.again;
        };
        self.fault(&fault, Some(node));
        if outcome.answered && fault.kind() == "timeout" {
            // Slow, but there: more was asked for than fits into the time.
            self.turned(pass.succeeded(), Some(node));
        } else {
            self.turned(pass.failed(), Some(node));
            self.nodes.disconnect(node);
            // Somebody else may be the master by now.
            self.nodes.forget();
        }
        if fault.is_passing() {
            outcome.again
        } else {
            Vec::new()
        }
    }

    fn pipeline(
        &self,
        node: &Node,
        wire: &mut Wire,
        group: Vec<Wanted>,
        send: &mut impl FnMut(&mut Wire, usize) -> io::Result<()>,
        receive: &mut impl FnMut(&mut Wire, usize) -> io::Result<Answer>,
    ) -> Outcome {
        let mut queue = VecDeque::from(group);
        let mut flying: VecDeque<Wanted> = VecDeque::new();
        let mut outcome = Outcome {
            again: Vec::new(),
            answered: false,
            fault: None,
        };
        let mut step = |flying: &mut VecDeque<Wanted>, outcome: &mut Outcome| -> io::Result<bool> {
            while flying.len() < WINDOW && !queue.is_empty() {
                flying.extend(queue.pop_front());
                let (index, asked) = flying.back().expect("just put there");
                if asked.is_some() {
                    wire.write_all(&mut [IoSlice::new(b"*1\r\n$6\r\nASKING\r\n")])?;
                }
                send(wire, *index)?;
            }
            let Some((index, asked)) = flying.front() else {
                return Ok(false);
            };
            if asked.is_some() {
                resp::reply(wire)?;
            }
            let answer = receive(wire, *index)?;
            outcome.answered = true;
            let (index, _) = flying.pop_front().expect("the front");
            match answer {
                Answer::Done => {}
                Answer::Error(text) => {
                    let again = self.refused(&text, node);
                    outcome.again.extend(again.map(|asked| (index, asked)));
                }
                Answer::Last(error) => return Err(error),
            }
            Ok(true)
        };
        loop {
            match step(&mut flying, &mut outcome) {
                Ok(true) => {}
                Ok(false) => return outcome,
                Err(error) => {
                    outcome.fault = Some(error.into());
                    outcome.again.extend(flying);
                    outcome.again.extend(queue);
                    return outcome;
                }
            }
        }
    }

    /// An error came instead of a reply. `Some` when the key should be tried again, and where if the error says it.
    fn refused(&self, text: &str, node: &Node) -> Option<Option<Arc<Node>>> {
        if !is_passing(text) {
            let fault = Fault::Refused(text.to_string());
            self.fault(&fault, Some(node));
            return None;
        }
        if text.starts_with("ASK ") {
            return Some(self.nodes.redirected(node, text));
        }
        self.nodes.forget();
        Some(None)
    }

    fn names(&self, keys: &[Key]) -> Vec<Vec<u8>> {
        keys.iter().map(|key| self.name_of(key)).collect()
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
    }
}

impl Tier for Redis {
    fn name(&self) -> &str {
        NAME
    }

    fn contains(&self, keys: &[Key]) -> Vec<u8> {
        let mut found = vec![0; keys.len()];
        let names = self.names(keys);
        let send = |wire: &mut Wire, index: usize| send_command(wire, &[b"EXISTS", &names[index]]);
        self.each(
            &names,
            self.deadline(),
            send,
            |wire, index| match resp::reply(wire)? {
                Reply::Error(text) => Ok(Answer::Error(text)),
                reply => {
                    found[index] = u8::from(reply == Reply::Number(1));
                    Ok(Answer::Done)
                }
            },
        );
        found
    }

    fn get(&self, keys: &[Key], sink: &mut dyn Sink) {
        let since = Instant::now();
        let (mut hits, mut bytes) = (0, 0);
        let names = self.names(keys);
        let send = |wire: &mut Wire, index: usize| send_command(wire, &[b"GET", &names[index]]);
        self.each(&names, since + self.timeout, send, |wire, index| {
            let length = match resp::start(wire)? {
                Start::Bulk(length) => length,
                Start::Reply(Reply::Error(text)) => return Ok(Answer::Error(text)),
                Start::Reply(Reply::Nil) => return Ok(Answer::Done),
                Start::Reply(_) => {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, "no value"));
                }
            };
            let left = match deliver(wire, length, &keys[index], index, sink)? {
                Delivery::Taken => {
                    hits += 1;
                    bytes += length;
                    0
                }
                Delivery::Unwanted(left) => left,
                Delivery::Bad(kind, why, left) => {
                    let name = String::from_utf8_lossy(&names[index]);
                    self.meter.error(NAME, kind, format_args!("{name}: {why}"));
                    left
                }
            };
            let rest = wire.skip(left).and_then(|()| resp::end_of_bulk(wire));
            Ok(rest.map_or_else(Answer::Last, |()| Answer::Done))
        });
        self.meter.got(keys.len(), hits, bytes, since);
    }

    fn put(&self, frames: &[Frame<'_>]) -> usize {
        let since = Instant::now();
        let (mut stored, mut bytes) = (0, 0);
        let names: Vec<_> = frames
            .iter()
            .map(|frame| self.name_of(&frame.head.header.key))
            .collect();
        let ttl = self.ttl.map(|ttl| ttl.as_millis());
        // The time is that of one record: nobody waits here, and slow is better than never.
        let whole = since + self.timeout * u32::try_from(frames.len().max(1)).unwrap_or(u32::MAX);
        let send = |wire: &mut Wire, index: usize| {
            wire.set_deadline(self.deadline());
            resp::send_set(wire, &names[index], frames[index].slices(), ttl)
        };
        self.each(&names, whole, send, |wire, index| {
            wire.set_deadline(self.deadline());
            match resp::reply(wire)? {
                Reply::Error(text) => Ok(Answer::Error(text)),
                Reply::Text(_) => {
                    stored += 1;
                    bytes += frames[index].len() as u64;
                    Ok(Answer::Done)
                }
                _ => Err(io::Error::new(io::ErrorKind::InvalidData, "no OK")),
            }
        });
        self.meter.put(frames.len(), stored, bytes, since);
        stored
    }

    fn remove(&self, keys: &[Key]) {
        let names = self.names(keys);
        let send = |wire: &mut Wire, index: usize| send_command(wire, &[b"UNLINK", &names[index]]);
        self.each(
            &names,
            self.deadline(),
            send,
            |wire, _| match resp::reply(wire)? {
                Reply::Error(text) => Ok(Answer::Error(text)),
                _ => Ok(Answer::Done),
            },
        );
    }

    fn clear(&self, namespace: Option<&Key>) {
        let deadline = Instant::now() + CLEARING;
        let Some(route) = self.route(self.deadline()) else {
            return;
        };
        for node in route.nodes() {
            let cleared = self
                .nodes
                .connection(&node, self.deadline())
                .and_then(|mut wire| {
                    scan::clear(&mut wire, &self.prefix, namespace, self.timeout, deadline)?;
                    self.nodes.put_back(&node, wire);
                    Ok(())
                });
            if let Err(fault) = cleared {
                self.fault(&fault, Some(&node));
            }
        }
    }

    fn stats(&self) -> TierStats {
        self.meter.stats()
    }

    fn close(&self) {
        self.closed.store(true, Relaxed);
        self.nodes.close();
    }
}

fn send_command(wire: &mut Wire, parts: &[&[u8]]) -> io::Result<()> {
    let mut bytes = Vec::new();
    resp::command(parts, &mut bytes);
    wire.write_all(&mut [IoSlice::new(&bytes)])
}
