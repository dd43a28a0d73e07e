//! Tiers below memory: one trait, what implements it, and the store that moves records between memory and them.
//!
//! - [`tier`]: the trait, and the sink that takes what a tier reads.
//! - [`TieredStore`]: memory above an ordered list of tiers. `writes` sends committed records down, behind the commit;
//!   [`loads`] brings them up on demand, each once for all who ask, and proves them.
//! - [`disk`]: append-only segment files.
//! - [`remote`]: Redis and Valkey, object stores, shared directories.

mod copies;
pub mod disk;
pub mod loads;
mod meter;
mod process;
pub mod remote;
mod store;
pub mod tier;
mod writes;

pub use disk::{Disk, DiskOptions};
pub use loads::{LoadStats, Outcome, Ticket};
pub use meter::{Meter, TierStats};
pub use store::{Level, Options, TieredStore};
pub use tier::{Key, Shape, Sink, Tier, Tiers};
