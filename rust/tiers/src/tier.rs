//! What a tier below memory is.
//!
//! Tiers are called from threads of their own, never from an engine's: a call may block, for a time that the tier bounds. A
//! tier has no errors to handle: whatever goes wrong is a miss, or a record that is not stored, counted in
//! [`Meter`](crate::Meter) and told in one line of log. What it returns is never trusted: the caller proves length, checksum
//! and identity of every record.

use std::fmt::Debug;
use std::ptr::NonNull;
use std::sync::Arc;

use blendstore_codec::Frame;
pub use blendstore_core::{Key, Shape};

use crate::meter::TierStats;

/// A place for records below memory. Values are frames ([`blendstore_codec::frame`]); one value is one record.
pub trait Tier: Send + Sync + Debug {
    /// Short name for metrics and logs, without secrets: `disk`, `redis`, …
    fn name(&self) -> &str;

    /// One byte per key, 1 for a record that is probably there. Cheap, or all zeros.
    fn contains(&self, keys: &[Key]) -> Vec<u8>;

    /// Reads records and hands them to `sink`, in any order, each at most once. Keys that are not there, or can't be read in
    /// time, are left out.
    fn get(&self, keys: &[Key], sink: &mut dyn Sink);

    /// Stores records under [`Header::key`](blendstore_codec::Header::key), whole or not at all, instead of what is there.
    /// Returns how many were stored.
    fn put(&self, frames: &[Frame<'_>]) -> usize;

    /// Drops records.
    fn remove(&self, keys: &[Key]);

    /// Drops every record of the namespace with that name ([`blendstore_core::Namespace::name`]), or every record. A tier
    /// that is shared with other machines may have nothing to find them by, and drops none.
    fn clear(&self, namespace: Option<&Key>);

    /// Keys of records that went by the tier's own doing since it was last asked, as far as it knows.
    fn lost(&self) -> Vec<Key> {
        Vec::new()
    }

    /// Counters and gauges now.
    fn stats(&self) -> TierStats;

    /// Ends background work and gives resources back. Later calls miss and store nothing.
    fn close(&self);
}

/// From fast to slow.
pub type Tiers = Vec<Arc<dyn Tier>>;

/// Takes the records that a tier reads. `index` is the key's in the call of [`Tier::get`].
///
/// # Safety
/// Room that was handed out stays writable, and is used by nobody else, until `filled` or `failed` of that index, or until
/// the sink is dropped.
pub unsafe trait Sink {
    /// Room for exactly the raw payload of a record of that shape, where it will stay; starts at a multiple of 512 bytes.
    /// `None` when it is not wanted any more or there is no room: skip this key. A tier that delivers whole frames doesn't
    /// ask.
    fn room(&mut self, index: usize, shape: &Shape) -> Option<NonNull<[u8]>>;

    /// The payload is in the room, and this is the head before it. False: the bytes are no such record, forget them.
    fn filled(&mut self, index: usize, head: &[u8]) -> bool;

    /// The room is not needed: the read went wrong.
    fn failed(&mut self, index: usize);

    /// A whole frame. False: the bytes are no such record, forget them.
    fn frame(&mut self, index: usize, frame: &[u8]) -> bool;
}
