//! Remote tiers: Redis and Valkey, object stores, shared directories, named by one URL.
//!
//! Every call ends by a time-out, what fails is a miss, and a remote that keeps failing is left alone for a while and then tried
//! again (`breaker`). No connection is made but to what the URL names, and, where that is a cluster or sentinels, to the
//! servers that these name.

mod breaker;
mod chance;
mod delivery;
mod fault;
#[cfg(test)]
mod garbled;
mod http;
mod nodes;
mod objects;
mod redis;
mod resp;
mod scan;
mod share;
mod tls;
pub mod url;
mod wire;

use std::sync::Arc;
use std::time::Duration;

pub use objects::Objects;
pub use redis::Redis;
pub use share::Share;
pub use url::{RemoteUrl, UrlError, redacted};

use crate::tier::Tier;

/// The tier that a URL names; `timeout` bounds each of its calls. Only files of this machine are looked at: a server that
/// is not there yet is no error.
///
/// The error says what is wrong, with secrets left out.
pub fn open(url: &str, timeout: Duration) -> Result<Arc<dyn Tier>, String> {
    let about = |error: String| format!("remote_url {:?}: {error}", redacted(url));
    match RemoteUrl::parse(url).map_err(|error| about(error.to_string()))? {
        RemoteUrl::Redis(parsed) => {
            let tls = parsed
                .tls
                .as_ref()
                .map(tls::client)
                .transpose()
                .map_err(about)?;
            Ok(Arc::new(Redis::new(parsed, tls, timeout)))
        }
        RemoteUrl::Objects(parsed) => Ok(Arc::new(Objects::open(&parsed, timeout).map_err(about)?)),
        RemoteUrl::Share(directory) => {
            Ok(Arc::new(Share::open(&directory, timeout).map_err(about)?))
        }
    }
}
