//! Random spread for pauses, so that many clients of one server don't come back in step.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

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
