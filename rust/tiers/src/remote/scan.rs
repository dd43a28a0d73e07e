//! Finds our records among what else a server keeps, to drop them: those of one namespace, or all.

use std::time::{Duration, Instant};

use blendstore_codec::frame::FIXED;

use super::delivery::is_of;
use super::fault::Fault;
use super::nodes::ask;
use super::resp::Reply;
use super::wire::Wire;
use crate::tier::Key;

/// Keys that the server looks at in one step.
const STEP: &[u8] = b"512";

/// Drops the records of one server whose names begin with `prefix`. Each step takes at most `timeout`, all of them until
/// `deadline`.
pub(super) fn clear(
    wire: &mut Wire,
    prefix: &[u8],
    namespace: Option<&Key>,
    timeout: Duration,
    deadline: Instant,
) -> Result<(), Fault> {
    let pattern = [prefix, b"*"].concat();
    let last = (FIXED - 1).to_string();
    let mut cursor = b"0".to_vec();
    loop {
        let mut say = |parts: &[&[u8]]| {
            wire.set_deadline(deadline.min(Instant::now() + timeout));
            match ask(wire, parts)? {
                Reply::Error(text) => Err(Fault::Refused(text)),
                reply => Ok(reply),
            }
        };
        let reply = say(&[b"SCAN", &cursor, b"MATCH", &pattern, b"COUNT", STEP])?;
        let [Reply::Text(next), Reply::Array(names)] = reply.items() else {
            return Err(Fault::protocol("no answer to SCAN"));
        };
        for name in names {
            let Reply::Text(name) = name else { continue };
            let ours = match namespace {
                None => true,
                Some(namespace) => match say(&[b"GETRANGE", name, b"0", last.as_bytes()])? {
                    Reply::Text(head) => is_of(namespace, &head),
                    _ => false,
                },
            };
            if ours {
                say(&[b"UNLINK", name])?;
            }
        }
        if next == b"0" {
            return Ok(());
        }
        cursor.clone_from(next);
    }
}
