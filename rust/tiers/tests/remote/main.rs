//! The remote tiers against real servers: Redis and Valkey in every topology, an S3-compatible server, a directory. Faults are
//! injected on the wire and on the servers. `make services` puts the servers where these tests look for them.

mod hostile;
mod objects;
mod records;
mod servers;
mod share;
mod topologies;
mod wire_faults;

use std::sync::Arc;
use std::time::Duration;

use blendstore_tiers::Tier;
use blendstore_tiers::remote;

/// Of tests in which nothing goes wrong: the machine may be busy.
const PATIENT: Duration = Duration::from_secs(30);

fn open(url: &str) -> Arc<dyn Tier> {
    remote::open(url, PATIENT).unwrap()
}

fn errors(tier: &dyn Tier, kind: &str) -> u64 {
    tier.stats().errors.get(kind).copied().unwrap_or(0)
}
