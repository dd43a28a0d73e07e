//! Case f07: a device without space, played by a limit on the size of files, in a process of its own because the limit is
//! the process's.

mod common;

use std::time::Duration;

fn limit_files_to(bytes: u64) {
    // SAFETY: plain calls with a structure of ours; this process has one test.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        let mut limit: libc::rlimit = std::mem::zeroed();
        libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit);
        limit.rlim_cur = bytes.min(limit.rlim_max);
        libc::setrlimit(libc::RLIMIT_FSIZE, &limit);
    }
}

/// Stores stop with a counter, memory and what is on disk are served, nothing waits for ever.
#[test]
fn case_f07_stores_stop_and_serving_goes_on() {
    let scratch = common::Scratch::new("no-space");
    let store = common::open(&scratch.0, 64 << 20, 64 << 20).expect("a store");
    (0..30).for_each(|number| common::store(&store, number));
    assert!(store.flush(Duration::from_secs(30)));
    limit_files_to(300_000);
    (100..200).for_each(|number| common::store(&store, number));
    assert!(
        store.flush(Duration::from_secs(30)),
        "what can't be written is dropped"
    );
    let stats = store.tier_stats().remove(0).1;
    assert!(stats.errors["no_space"] > 0, "{stats:?}");
    assert!(stats.dropped > 0, "{stats:?}");
    assert_eq!(stats.puts + stats.dropped, 130);
    store.memory().clear(None);
    let all: Vec<u32> = (0..30).collect();
    assert_eq!(common::load(&store, &all), [true; 30]);
    common::store(&store, 300);
    assert_eq!(store.contains(&[common::key(300)]), [1]);
    limit_files_to(u64::MAX);
}
