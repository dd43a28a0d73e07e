//! Servers, their idle connections, and which of them keeps which key: one server, the master that Sentinels name, or the
//! nodes of a cluster.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustls::ClientConfig;

use super::breaker::Breaker;
use super::fault::Fault;
use super::resp::{self, Reply};
use super::url::{Address, Login, RedisUrl, Topology};
use super::wire::{Place, Wire};

/// Connections kept for later, of each server.
const IDLE: usize = 8;
/// Slots of a cluster.
const SLOTS: u16 = 16_384;

/// One server.
#[derive(Debug)]
pub(super) struct Node {
    pub place: Place,
    /// Refuses calls while this server is off.
    pub breaker: Breaker,
    idle: Mutex<Vec<Wire>>,
}

/// All servers that are known.
#[derive(Debug)]
pub(super) struct Nodes {
    url: RedisUrl,
    tls: Option<Arc<ClientConfig>>,
    known: Mutex<HashMap<Place, Arc<Node>>>,
    route: Mutex<Option<Arc<Route>>>,
}

/// Which server keeps which key.
#[derive(Debug)]
pub(super) enum Route {
    /// One keeps all.
    One(Arc<Node>),
    /// Slots `first..=last`, ascending.
    Slots(Vec<(u16, u16, Arc<Node>)>),
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Route {
    /// The server of a key; none where a cluster doesn't cover its slot.
    pub fn of(&self, key: &[u8]) -> Option<&Arc<Node>> {
        match self {
            Self::One(node) => Some(node),
            Self::Slots(slots) => {
                let slot = crc16(key) % SLOTS;
                let at = slots.partition_point(|(_, last, _)| *last < slot);
                slots
                    .get(at)
                    .filter(|(first, _, _)| *first <= slot)
                    .map(|(_, _, node)| node)
            }
        }
    }

    /// Every server that keeps keys, each once.
    pub fn nodes(&self) -> Vec<Arc<Node>> {
        match self {
            Self::One(node) => vec![node.clone()],
            Self::Slots(slots) => {
                let mut nodes: Vec<Arc<Node>> = Vec::new();
                for (_, _, node) in slots {
                    if !nodes.iter().any(|known| known.place == node.place) {
                        nodes.push(node.clone());
                    }
                }
                nodes
            }
        }
    }
}

impl Nodes {
    pub fn new(url: RedisUrl, tls: Option<Arc<ClientConfig>>) -> Self {
        Self {
            url,
            tls,
            known: Mutex::default(),
            route: Mutex::default(),
        }
    }

    /// The server at that place.
    pub fn node(&self, place: Place) -> Arc<Node> {
        let fresh = || {
            Arc::new(Node {
                place: place.clone(),
                breaker: Breaker::default(),
                idle: Mutex::default(),
            })
        };
        lock(&self.known)
            .entry(place.clone())
            .or_insert_with(fresh)
            .clone()
    }

    /// Closes every idle connection.
    pub fn close(&self) {
        for node in lock(&self.known).values() {
            lock(&node.idle).clear();
        }
    }

    /// A connection that is logged in. Hand it back with [`Nodes::put_back`] when every reply has been read.
    pub fn connection(&self, node: &Node, deadline: Instant) -> Result<Wire, Fault> {
        loop {
            let idle = lock(&node.idle).pop();
            match idle {
                Some(wire) if wire.is_stale() => {}
                Some(mut wire) => {
                    wire.set_deadline(deadline);
                    return Ok(wire);
                }
                None => {
                    return self.connect(&node.place, &self.url.login, self.url.database, deadline);
                }
            }
        }
    }

    /// Keeps it for the next call.
    pub fn put_back(&self, node: &Node, wire: Wire) {
        let mut idle = lock(&node.idle);
        if idle.len() < IDLE {
            idle.push(wire);
        }
    }

    /// Drops the idle connections of a server that has failed: they are as dead as the one that was in use.
    pub fn disconnect(&self, node: &Node) {
        lock(&node.idle).clear();
    }

    fn connect(
        &self,
        place: &Place,
        login: &Login,
        database: u32,
        deadline: Instant,
    ) -> Result<Wire, Fault> {
        let mut wire = Wire::connect(place, self.tls.as_ref(), deadline).map_err(Fault::Connect)?;
        if let Some(password) = &login.password {
            let parts: &[&[u8]] = match &login.user {
                Some(user) => &[b"AUTH", user.as_bytes(), password.reveal().as_bytes()],
                None => &[b"AUTH", password.reveal().as_bytes()],
            };
            if let Reply::Error(text) = ask(&mut wire, parts)? {
                // The first word only: a server may repeat what it was sent.
                let word = text
                    .split(' ')
                    .next()
                    .unwrap_or("")
                    .chars()
                    .filter(char::is_ascii_uppercase)
                    .collect();
                return Err(Fault::Login(word));
            }
        }
        if database != 0
            && let Reply::Error(text) =
                ask(&mut wire, &[b"SELECT", database.to_string().as_bytes()])?
        {
            return Err(Fault::Refused(text));
        }
        Ok(wire)
    }

    /// Where keys are, found out first if that is not known.
    pub fn route(&self, deadline: Instant) -> Result<Arc<Route>, Fault> {
        if let Some(route) = &*lock(&self.route) {
            return Ok(route.clone());
        }
        // Not under the lock: finding out takes a while, and to do it twice does no harm.
        let route = Arc::new(self.discover(deadline)?);
        *lock(&self.route) = Some(route.clone());
        Ok(route)
    }

    /// What was known about it is not true any more.
    pub fn forget(&self) {
        *lock(&self.route) = None;
    }

    fn discover(&self, deadline: Instant) -> Result<Route, Fault> {
        let one = |address: &Address| self.node(Place::Address(address.clone()));
        match &self.url.topology {
            Topology::Single(address) => Ok(Route::One(one(address))),
            Topology::Socket(path) => Ok(Route::One(self.node(Place::Socket(path.clone())))),
            Topology::Sentinel {
                sentinels,
                master,
                login,
            } => first(sentinels, deadline, |sentinel, deadline| {
                let mut wire =
                    self.connect(&Place::Address(sentinel.clone()), login, 0, deadline)?;
                let reply = ask(
                    &mut wire,
                    &[b"SENTINEL", b"get-master-addr-by-name", master.as_bytes()],
                )?;
                match (reply.items(), &reply) {
                    ([host, port], _) => {
                        match (host.text(), port.text().and_then(|port| port.parse().ok())) {
                            (Some(host), Some(port)) => {
                                self.master(&Address { host, port }, deadline)
                            }
                            _ => Err(Fault::protocol("an address of the master that is none")),
                        }
                    }
                    (_, Reply::Error(text)) => Err(Fault::Refused(text.clone())),
                    _ => Err(Fault::Refused(format!(
                        "sentinel {sentinel} knows no master {master:?}"
                    ))),
                }
            }),
            Topology::Cluster(seeds) => {
                // Nodes that were met are asked too: the seeds may be gone by now.
                let mut places = seeds.clone();
                for place in lock(&self.known).keys() {
                    if let Place::Address(address) = place
                        && !places.contains(address)
                    {
                        places.push(address.clone());
                    }
                }
                first(&places, deadline, |seed, deadline| {
                    let node = one(seed);
                    let mut wire = self.connection(&node, deadline)?;
                    let reply = ask(&mut wire, &[b"CLUSTER", b"SLOTS"])?;
                    self.put_back(&node, wire);
                    match &reply {
                        Reply::Error(text) => Err(Fault::Refused(text.clone())),
                        _ => self.slots(seed, &reply),
                    }
                })
            }
        }
    }

    /// That server, if it says that it is a master: a sentinel may not have heard yet.
    fn master(&self, address: &Address, deadline: Instant) -> Result<Route, Fault> {
        let node = self.node(Place::Address(address.clone()));
        let mut wire = self.connection(&node, deadline)?;
        let role = ask(&mut wire, &[b"ROLE"])?;
        self.put_back(&node, wire);
        match (role.items().first().and_then(Reply::text).as_deref(), &role) {
            (Some("master"), _) => Ok(Route::One(node)),
            // An account that may not ask: the sentinel's word has to do.
            (None, Reply::Error(text)) if text.starts_with("NOPERM") => Ok(Route::One(node)),
            _ => Err(Fault::Refused(format!("{address} is no master yet"))),
        }
    }

    /// `[[first, last, [host, port, …], …], …]`
    fn slots(&self, seed: &Address, reply: &Reply) -> Result<Route, Fault> {
        let mut slots = Vec::new();
        for range in reply.items() {
            let [Reply::Number(first), Reply::Number(last), master, ..] = range.items() else {
                return Err(Fault::protocol("slots of another form"));
            };
            let (Ok(first), Ok(last)) = (u16::try_from(*first), u16::try_from(*last)) else {
                return Err(Fault::protocol("slots beyond 16383"));
            };
            let [host, Reply::Number(port), ..] = master.items() else {
                return Err(Fault::protocol("slots of another form"));
            };
            // A node that doesn't know its own name leaves it out.
            let host = host
                .text()
                .filter(|host| !host.is_empty() && host != "?")
                .unwrap_or_else(|| seed.host.clone());
            let Ok(port) = u16::try_from(*port) else {
                return Err(Fault::protocol("a port beyond 65535"));
            };
            if first > last || last >= SLOTS {
                return Err(Fault::protocol("slots beyond 16383"));
            }
            slots.push((
                first,
                last,
                self.node(Place::Address(Address { host, port })),
            ));
        }
        if slots.is_empty() {
            return Err(Fault::Refused("CLUSTERDOWN no slots are assigned".into()));
        }
        slots.sort_by_key(|(first, ..)| *first);
        Ok(Route::Slots(slots))
    }

    /// The server that a `MOVED` or `ASK` of `from` names: `MOVED 3999 127.0.0.1:6381`.
    pub fn redirected(&self, from: &Node, text: &str) -> Option<Arc<Node>> {
        let (host, port) = text.split(' ').nth(2)?.rsplit_once(':')?;
        let port = port.parse().ok()?;
        let host = match (host, &from.place) {
            ("" | "?", Place::Address(address)) => address.host.clone(),
            ("" | "?", Place::Socket(_)) => return None,
            _ => host.trim_matches(['[', ']']).to_string(),
        };
        Some(self.node(Place::Address(Address { host, port })))
    }
}

/// What the first of several servers says, each with its share of the time; else the last fault.
fn first(
    places: &[Address],
    deadline: Instant,
    mut ask: impl FnMut(&Address, Instant) -> Result<Route, Fault>,
) -> Result<Route, Fault> {
    let mut last = Fault::Connect(io::ErrorKind::NotFound.into());
    for (index, place) in places.iter().enumerate() {
        let now = Instant::now();
        let share = deadline.saturating_duration_since(now) / (places.len() - index) as u32;
        match ask(place, now + share) {
            Ok(route) => return Ok(route),
            Err(fault) => last = fault,
        }
    }
    Err(last)
}

/// One command, one reply.
pub(super) fn ask(wire: &mut Wire, parts: &[&[u8]]) -> Result<Reply, Fault> {
    let mut bytes = Vec::new();
    resp::command(parts, &mut bytes);
    wire.write_all(&mut [io::IoSlice::new(&bytes)])?;
    Ok(resp::reply(wire)?)
}

/// CRC-16/XMODEM, as clusters hash keys. Ours have no `{`, behind which only a part would count.
fn crc16(key: &[u8]) -> u16 {
    key.iter().fold(0, |crc, &byte| {
        (0..8).fold(crc ^ (u16::from(byte) << 8), |crc, _| {
            if crc & 0x8000 != 0 {
                (crc << 1) ^ 0x1021
            } else {
                crc << 1
            }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_the_slots_of_the_specification() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
    }
}
