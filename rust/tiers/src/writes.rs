//! Write-behind to one tier: committed records wait in a bounded queue, pinned in memory, until a thread has written them.
//!
//! When the queue is full a record is not queued but remembered by its key; once there is room, those that are still in
//! memory are queued after all. So eviction never waits for a tier: what it takes is below already, or is lost and counted.
//!
//! What is no longer resident when its turn comes was cleared or replaced, and is not written: a clear empties memory before
//! the tiers, so whenever a record is queued, nothing of what was cleared reaches a tier that is empty already.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use blendstore_codec::{Codec, Frame, Head, Header, Parts};
use blendstore_core::{Key, Namespace, Record, Store};

use crate::copies::Copies;
use crate::meter::TierStats;
use crate::store::Level;

/// Records and bytes of one call of the tier.
const BATCH: usize = 32;
const BATCH_BYTES: u64 = 64 << 20;
/// Keys remembered while the queue is full.
const LATER: usize = 1 << 16;

/// The queue of one tier.
#[derive(Debug)]
pub(crate) struct Writes {
    level: Level,
    pub copies: Copies,
    most_bytes: u64,
    queue: Mutex<Queue>,
    bell: Condvar,
    /// Held while a batch is written, so that `discard` can wait for it.
    writing: Mutex<()>,
}

#[derive(Debug, Default)]
struct Queue {
    records: VecDeque<Arc<Record>>,
    bytes: u64,
    later: VecDeque<Key>,
    /// Records taken out and not written yet.
    busy: usize,
    dropped: u64,
    ended: bool,
}

impl Writes {
    /// `number` is the tier's, from 0 on.
    pub(crate) fn new(level: Level, number: usize, most_bytes: u64) -> Self {
        Self {
            level,
            copies: Copies::new(number),
            most_bytes,
            queue: Mutex::default(),
            bell: Condvar::new(),
            writing: Mutex::default(),
        }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues records, as far as there is room.
    pub(crate) fn push(&self, records: &[Arc<Record>]) {
        let mut queue = self.queue();
        if queue.ended {
            return;
        }
        for record in records {
            self.enter(&mut queue, record);
        }
        drop(queue);
        self.bell.notify_all();
    }

    fn enter(&self, queue: &mut Queue, record: &Arc<Record>) {
        if self.fits(queue, record) {
            queue.bytes += record.payload().len() as u64;
            queue.records.push_back(record.clone());
        } else if queue.later.len() < LATER {
            queue.later.push_back(record.key());
        } else {
            queue.dropped += 1;
        }
    }

    /// Whether there is room; one record alone always has it.
    fn fits(&self, queue: &Queue, record: &Record) -> bool {
        queue.bytes == 0 || queue.bytes + record.payload().len() as u64 <= self.most_bytes
    }

    /// Queues what was remembered, as far as there is room.
    fn catch_up(&self, queue: &mut Queue, memory: &Store) {
        while queue.bytes < self.most_bytes / 2
            && let Some(key) = queue.later.front()
        {
            match memory.record(key).map(Arc::new) {
                Some(record) if self.fits(queue, &record) => self.enter(queue, &record),
                Some(_) => return,
                None => queue.dropped += 1,
            }
            queue.later.pop_front();
        }
    }

    /// Writes until the end.
    pub(crate) fn run(&self, memory: &Store) {
        while self.wait(memory) {
            let writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
            let batch = self.take();
            // A tier that panics has stored nothing, like any that fails.
            let writes = AssertUnwindSafe(|| self.write(memory, &batch));
            if !batch.is_empty() && catch_unwind(writes).is_err() {
                self.queue().dropped += batch.len() as u64;
            }
            self.queue().busy = 0;
            drop(writing);
            self.bell.notify_all();
        }
    }

    /// Waits for records; false at the end.
    fn wait(&self, memory: &Store) -> bool {
        let mut queue = self.queue();
        loop {
            if queue.ended {
                return false;
            }
            self.catch_up(&mut queue, memory);
            if !queue.records.is_empty() {
                return true;
            }
            // Who waits in `flush` waits for what was remembered, too.
            self.bell.notify_all();
            queue = self
                .bell
                .wait(queue)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The next batch. The caller is `writing`: a clear that this does not see yet waits for the batch, and takes it back.
    fn take(&self) -> Vec<Arc<Record>> {
        let mut queue = self.queue();
        let (mut batch, mut bytes) = (Vec::new(), 0);
        while batch.len() < BATCH
            && bytes < BATCH_BYTES
            && let Some(record) = queue.records.pop_front()
        {
            let room = record.payload().len() as u64;
            queue.bytes -= room;
            if record.is_resident() {
                bytes += room;
                batch.push(record);
            }
        }
        queue.busy = batch.len();
        batch
    }

    /// Frames records and puts them.
    fn write(&self, memory: &Store, records: &[Arc<Record>]) {
        let level = &self.level;
        let mut coded: Vec<(Vec<u8>, Option<Vec<u8>>)> = Vec::with_capacity(records.len());
        for record in records {
            coded.push(encode(level, record));
        }
        let frames: Vec<Frame<'_>> = coded
            .iter()
            .zip(records)
            .filter_map(|((head, payload), record)| {
                let payload = payload.as_deref().unwrap_or_else(|| record.payload());
                Head::parse(head).ok().map(|head| Frame { head, payload })
            })
            .collect();
        let kept = level.tier.put(&frames);
        self.copies.written(memory, &*level.tier, records, kept);
    }

    /// Forgets what is queued of a namespace (or of all), waits for what is being written, and then does `clear`.
    pub(crate) fn discard(&self, namespace: Option<&Namespace>, clear: impl FnOnce()) {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut queue = self.queue();
        queue.records.retain(|record| {
            namespace.is_some_and(|namespace| *namespace.digest() != record.namespace())
        });
        queue.bytes = queue
            .records
            .iter()
            .map(|record| record.payload().len() as u64)
            .sum();
        drop(queue);
        clear();
        self.copies.forget();
        self.bell.notify_all();
    }

    /// Waits until nothing is queued or being written; whether that is so.
    pub(crate) fn flush(&self, deadline: Instant) -> bool {
        let mut queue = self.queue();
        loop {
            if queue.records.is_empty() && queue.later.is_empty() && queue.busy == 0 {
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || queue.ended {
                return false;
            }
            (queue, _) = self
                .bell
                .wait_timeout(queue, left)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Writes nothing more but the batch at hand.
    pub(crate) fn end(&self) {
        let mut queue = self.queue();
        queue.ended = true;
        queue.dropped += (queue.records.len() + queue.later.len()) as u64;
        queue.records.clear();
        queue.later.clear();
        queue.bytes = 0;
        drop(queue);
        self.bell.notify_all();
    }

    pub(crate) fn add_to(&self, stats: &mut TierStats) {
        let queue = self.queue();
        stats.queued += (queue.records.len() + queue.later.len() + queue.busy) as u64;
        stats.queued_bytes += queue.bytes;
        stats.dropped += queue.dropped;
    }
}

/// The head of a record's frame, and its payload if that is not the one in memory.
fn encode(level: &Level, record: &Record) -> (Vec<u8>, Option<Vec<u8>>) {
    let meta = record.meta();
    let mut header = Header {
        key: meta.key,
        parent: record.parent(),
        namespace: Namespace::from_digest(record.namespace()).name(),
        context: meta.context,
        ntokens: meta.ntokens as u32,
        bytes_per_token: (meta.nbytes / meta.ntokens) as u32,
        source_position: meta.source_position as u32,
        segment_offset: meta.segment_offset as u32,
        behind_tokens: meta.behind_tokens as u32,
        format: 0,
        codec: level.coder.codec(),
        provenance: meta.provenance,
        rank: meta.rank,
    };
    let mut coded = None;
    if header.codec != Codec::RAW {
        let mut bytes = Vec::new();
        match level
            .coder
            .encode(&header, &[], record.payload(), &mut bytes)
        {
            Ok(()) => coded = Some(bytes),
            Err(error) => {
                log::debug!(
                    "a record stays raw on its way to {}: {error}",
                    level.tier.name()
                );
                header.codec = Codec::RAW;
            }
        }
    }
    let parts = Parts {
        header,
        params: &[],
        tokens: record.tokens(),
        scores: record.scores(),
        behind: &meta.behind,
        payload: coded.as_deref().unwrap_or_else(|| record.payload()),
    };
    (parts.encode_head(), coded)
}
