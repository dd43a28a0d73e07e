//! Chunk store for KV caches.
