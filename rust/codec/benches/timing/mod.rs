//! Seconds of processor time, so that other work on the machine counts for less (it still takes cache, and the other half
//! of a core).

use std::time::Instant;

/// Median and best seconds of some rounds.
pub fn timed(rounds: usize, mut work: impl FnMut()) -> (f64, f64) {
    let start = Instant::now();
    let now = || processor_seconds().unwrap_or_else(|| start.elapsed().as_secs_f64());
    let mut times: Vec<f64> = (0..rounds)
        .map(|_| {
            let before = now();
            work();
            now() - before
        })
        .collect();
    times.sort_by(f64::total_cmp);
    (times[rounds / 2], times[0])
}

/// `1.23 GB/s (best 2.34)`.
pub fn speed(bytes: usize, (median, best): (f64, f64)) -> String {
    let gigabytes = bytes as f64 / 1e9;
    format!(
        "{:.2} GB/s (best {:.2})",
        gigabytes / median,
        gigabytes / best
    )
}

/// What this thread has used, where the system says so.
#[cfg(unix)]
#[allow(unsafe_code)]
fn processor_seconds() -> Option<f64> {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the call writes to `time` only.
    let status = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    (status == 0).then(|| time.tv_sec as f64 + time.tv_nsec as f64 / 1e9)
}

#[cfg(not(unix))]
fn processor_seconds() -> Option<f64> {
    None
}
