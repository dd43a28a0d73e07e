//! Tiers below memory: one trait, what implements it, and the store that moves records between memory and them.

mod meter;
pub mod tier;

pub use meter::{Meter, TierStats};
pub use tier::{Key, Shape, Sink, Tier, Tiers};
