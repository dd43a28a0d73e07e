//! Random spread for pauses, so that many clients of one server don't come back in step.

use std::hash::{BuildHasher, RandomState};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A small generator (xorshift), seeded differently in every process.
#[derive(Debug)]
pub(super) struct Chance(u64);

impl Default for Chance {
    fn default() -> Self {
        Self(RandomState::new().hash_one(0) | 1)
    }
}

impl Chance {
    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }

    /// Between a half and one and a half of `pause`.
    pub fn around(&mut self, pause: Duration) -> Duration {
        pause / 2 + Duration::from_nanos(self.below(pause.as_nanos() as u64 + 1))
    }
}

/// Pauses before repeated tries, each about twice as long as the one before.
#[derive(Debug)]
pub(super) struct Pauses {
    first: Duration,
    chance: Mutex<Chance>,
}

impl Pauses {
    /// The second try comes about `first` after the first one.
    pub fn new(first: Duration) -> Self {
        Self {
            first,
            chance: Mutex::default(),
        }
    }

    /// Waits before a try, counted from 0. False when there is no time for one.
    pub fn before(&self, attempt: u32, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        if attempt > 0 {
            let pause = self
                .chance
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .around(self.first * 2_u32.pow(attempt - 1));
            if pause >= left {
                return false;
            }
            std::thread::sleep(pause);
        }
        !left.is_zero()
    }
}
