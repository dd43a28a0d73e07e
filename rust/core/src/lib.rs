//! Chunk store for KV caches: keys, index, arena, eviction, leases, reservations and the matcher.
//!
//! ```
//! use blendstore_core::{Namespace, Options, Request, Store};
//!
//! let store = Store::open(Options { capacity_bytes: 1 << 20, ..Options::default() })?;
//! let namespace = Namespace::new(&[("model", b"weights digest")], b"tenant salt");
//! let tokens: Vec<u32> = (0..300).collect();
//!
//! let reservation = store.reserve(&namespace, &tokens, &Request { bytes_per_token: 8, ..Request::default() })?;
//! for index in 0..reservation.len() {
//!     reservation.payload(index)?.copy_from(&vec![7; 8 * reservation.bounds(index)?.len()]);
//! }
//! assert_eq!(reservation.commit(None)?, 2);
//!
//! let lease = store.lookup_segments(&namespace, &tokens, &[(0, 300)], false)?;
//! assert_eq!(lease.hits(), [1, 1]);
//! assert_eq!(lease.payload(1)?[0], 7);
//! # Ok::<(), blendstore_core::Error>(())
//! ```

mod admission;
mod arena;
mod chunk;
mod copies;
mod error;
mod events;
pub mod eviction;
pub mod index;
pub mod key;
mod lease;
mod ledger;
mod mapping;
mod matcher;
mod namespace;
mod record;
mod reservation;
mod resident;
pub mod simulator;
mod stats;
mod store;
mod sync;
mod victims;
mod word;

pub use admission::{Admission, Admitted, Facts, Shape};
pub use copies::Fetch;
pub use error::{Error, Result};
pub use events::{Event, EventKind};
pub use eviction::PolicyKind;
pub use key::Key;
pub use lease::{Lease, Meta, View};
pub use matcher::{Known, Match, Matcher, Resolver};
pub use namespace::Namespace;
pub use reservation::{Request, Reservation, ViewMut};
pub use resident::Record;
pub use stats::Stats;
pub use store::{Options, Store};
