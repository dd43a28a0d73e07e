//! Counters and gauges.
//!
//! What a lookup counts is spread over stripes, one cache line each, so that readers on different threads don't share one.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

macro_rules! stats {
    ($($(#[$doc:meta])* $name:ident)*) => {
        /// Counters and gauges of a store at one moment.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Stats {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Stats {
            /// Names and values.
            pub fn rows(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name)),*]
            }
        }
    };
}

stats! {
    /// Resident chunks.
    chunks
    /// Bytes of the arena in use: records being written, resident, or kept by a pin.
    bytes_used
    /// Bytes of the arena.
    bytes_capacity
    /// KV payload bytes of pinned chunks.
    bytes_pinned
    /// Leases not yet released.
    leases
    /// Reservations neither committed nor aborted.
    reservations
    /// Keys looked up.
    lookups
    /// Keys found.
    hits
    /// Keys not found.
    misses
    /// Chunks published under a new key.
    stored
    /// Chunks published in the place of one of lower rank.
    replaced
    /// Chunks that made room.
    evicted
    /// Reserved chunks that were given up.
    aborted
    /// Chunks refused because there was no room.
    rejected_full
    /// Chunk pins that a time-out took from their lease.
    expired_leases
    /// Runs of tokens that the matcher found.
    matches
    /// Memory of slots, index, allocator, eviction policy and matcher.
    metadata_bytes
}

/// What readers count. Gauges are sums of signed steps, so single stripes may wrap below zero.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Read {
    Hits,
    Misses,
    Leases,
    BytesPinned,
    Expired,
    Matches,
}

const STRIPES: usize = 32;

#[derive(Debug, Default)]
#[repr(align(128))]
struct Stripe([AtomicU64; 6]);

/// Striped counters of the read path.
#[derive(Debug, Default)]
pub(crate) struct ReadCounters {
    stripes: [Stripe; STRIPES],
}

static THREADS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static STRIPE: usize = THREADS.fetch_add(1, Ordering::Relaxed) % STRIPES;
}

impl ReadCounters {
    pub(crate) fn add(&self, what: Read, by: u64) {
        // The thread's own stripe is gone while thread-locals are torn down; any stripe will do then.
        let stripe = STRIPE.try_with(|stripe| *stripe).unwrap_or(0);
        self.stripes[stripe].0[what as usize].fetch_add(by, Ordering::Relaxed);
    }

    pub(crate) fn subtract(&self, what: Read, by: u64) {
        self.add(what, by.wrapping_neg());
    }

    pub(crate) fn sum(&self, what: Read) -> u64 {
        self.stripes.iter().fold(0, |sum, stripe| {
            sum.wrapping_add(stripe.0[what as usize].load(Ordering::Relaxed))
        })
    }
}
