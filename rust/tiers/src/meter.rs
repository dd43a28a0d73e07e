//! What a tier counts, and its rate-limited log.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// One line of log a tier and kind of error, at most that often.
const QUIET: Duration = Duration::from_secs(30);

macro_rules! meter {
    ($($(#[$doc:meta])* $name:ident)*) => {
        /// Counters and gauges of a tier at one moment. Times are in nanoseconds.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct TierStats {
            $($(#[$doc])* pub $name: u64,)*
            /// Errors by kind: a word each.
            pub errors: BTreeMap<&'static str, u64>,
        }

        impl TierStats {
            /// Names and values, without the errors.
            pub fn rows(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name)),*]
            }
        }

        /// Counters of one tier, shared by its threads.
        #[derive(Debug, Default)]
        pub struct Meter {
            $($(#[$doc])* pub $name: AtomicU64,)*
            errors: Mutex<BTreeMap<&'static str, Errors>>,
        }

        impl Meter {
            /// All of them now.
            pub fn stats(&self) -> TierStats {
                let errors = self.errors.lock().unwrap_or_else(PoisonError::into_inner);
                TierStats {
                    $($name: self.$name.load(Relaxed),)*
                    errors: errors.iter().map(|(kind, errors)| (*kind, errors.count)).collect(),
                }
            }
        }
    };
}

meter! {
    /// Keys asked for.
    gets
    /// Records delivered and accepted.
    hits
    /// Keys asked for and not delivered.
    misses
    /// Records stored.
    puts
    /// Records not stored: the queue was full, there was no space, the tier was off.
    dropped
    /// Records that made room.
    evicted
    /// Records there now, where the tier knows.
    records
    /// Bytes there now, where the tier knows.
    bytes_used
    /// Most bytes there may be, 0 where there is no bound.
    bytes_capacity
    /// Bytes of frames read.
    bytes_read
    /// Bytes of frames written.
    bytes_written
    /// Records that wait to be written.
    queued
    /// Bytes of records that wait to be written.
    queued_bytes
    /// Time in `get`, summed.
    get_nanoseconds
    /// Time in `put`, summed.
    put_nanoseconds
}

#[derive(Debug)]
struct Errors {
    count: u64,
    told: Option<Instant>,
}

impl Meter {
    /// Counts an error of that kind (a word) and logs it, unless that was done a moment ago. `what` holds no secrets.
    pub fn error(&self, tier: &str, kind: &'static str, what: impl Display) {
        let mut errors = self.errors.lock().unwrap_or_else(PoisonError::into_inner);
        let errors = errors.entry(kind).or_insert(Errors {
            count: 0,
            told: None,
        });
        errors.count += 1;
        if errors.told.is_none_or(|told| told.elapsed() >= QUIET) {
            errors.told = Some(Instant::now());
            log::warn!("tier {tier}: {kind} ({} so far): {what}", errors.count);
        }
    }

    /// Counts one `get`: keys asked for, records accepted, bytes of frames read, time taken.
    pub fn got(&self, keys: usize, hits: usize, bytes: u64, since: Instant) {
        self.gets.fetch_add(keys as u64, Relaxed);
        self.hits.fetch_add(hits as u64, Relaxed);
        self.misses.fetch_add((keys - hits) as u64, Relaxed);
        self.bytes_read.fetch_add(bytes, Relaxed);
        self.get_nanoseconds
            .fetch_add(since.elapsed().as_nanos() as u64, Relaxed);
    }

    /// Counts one `put`: records given, records stored, bytes of frames written, time taken.
    pub fn put(&self, records: usize, stored: usize, bytes: u64, since: Instant) {
        self.puts.fetch_add(stored as u64, Relaxed);
        self.dropped.fetch_add((records - stored) as u64, Relaxed);
        self.bytes_written.fetch_add(bytes, Relaxed);
        self.put_nanoseconds
            .fetch_add(since.elapsed().as_nanos() as u64, Relaxed);
    }
}
