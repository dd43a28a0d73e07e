//! The threads that the process computes with already: the OpenMP team of a library that it has loaded, as torch is.

use std::any::Any;
use std::ffi::{c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The process whose team may be used.
static HOME: OnceLock<u32> = OnceLock::new();

/// Remembers the process: a child that it forks has none of its team's threads, and starts threads of its own. To be called
/// before that, when the code is loaded.
pub fn settle() -> u32 {
    *HOME.get_or_init(std::process::id)
}

type Work = unsafe extern "C" fn(*mut c_void);
/// Does the work with the data on each of so many threads, this one included, and returns when all have; no flags are set.
type Parallel = unsafe extern "C" fn(Work, *mut c_void, c_uint, c_uint);

/// Of GCC's OpenMP library, or of one that stands in for it.
fn parallel() -> Option<Parallel> {
    #[cfg(target_os = "linux")]
    if settle() == std::process::id() {
        #[allow(unsafe_code)]
        // SAFETY: the name is a C string, and what has it in an OpenMP library is a function of this type.
        return unsafe {
            let found = libc::dlsym(libc::RTLD_DEFAULT, c"GOMP_parallel".as_ptr());
            std::mem::transmute::<*mut c_void, Option<Parallel>>(found)
        };
    }
    None
}

struct Shared<'a, F> {
    work: &'a F,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// `work` on `threads` threads of the team, this one included, or fewer; false without having done anything where there is
/// no team.
pub(super) fn run(threads: usize, work: &(impl Fn() + Sync)) -> bool {
    let (Some(parallel), Ok(threads)) = (parallel(), c_uint::try_from(threads)) else {
        return false;
    };
    run_by(parallel, threads, work);
    true
}

fn run_by<F: Fn() + Sync>(parallel: Parallel, threads: c_uint, work: &F) {
    let mut shared = Shared {
        work,
        panic: Mutex::new(None),
    };
    let data = (&raw mut shared).cast();
    #[allow(unsafe_code)]
    // SAFETY: `on_a_thread::<F>` takes a pointer to `Shared<F>`, which lives until all threads have returned from it.
    unsafe {
        parallel(on_a_thread::<F>, data, threads, 0);
    }
    let panic = shared.panic.into_inner();
    if let Some(panic) = panic.unwrap_or_else(PoisonError::into_inner) {
        resume_unwind(panic);
    }
}

/// # Safety
///
/// `data` points to a `Shared<F>` that nobody writes to meanwhile.
#[allow(unsafe_code)]
unsafe extern "C" fn on_a_thread<F: Fn() + Sync>(data: *mut c_void) {
    // SAFETY: as above; `F` and the mutex may be used from many threads.
    let shared = unsafe { &*data.cast::<Shared<'_, F>>() };
    // What called this can't be unwound. Nothing of the work is looked at after a panic but the first one.
    if let Err(panic) = catch_unwind(AssertUnwindSafe(shared.work)) {
        let mut first = shared.panic.lock().unwrap_or_else(PoisonError::into_inner);
        first.get_or_insert(panic);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// As the OpenMP library's, with threads that it starts.
    #[allow(unsafe_code)]
    unsafe extern "C" fn parallel(work: Work, data: *mut c_void, threads: c_uint, flags: c_uint) {
        assert_eq!(flags, 0);
        let data = data as usize;
        std::thread::scope(|scope| {
            for _ in 0..threads {
                // SAFETY: the data that the work was given with, until the scope ends.
                scope.spawn(move || unsafe { work(data as *mut c_void) });
            }
        });
    }

    #[test]
    fn every_thread_of_the_team_does_the_work() {
        let calls = AtomicUsize::new(0);
        run_by(parallel, 3, &|| {
            calls.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(calls.into_inner(), 3);
    }

    #[test]
    fn a_panic_waits_for_the_others_and_goes_on_here() {
        let calls = AtomicUsize::new(0);
        let ended = catch_unwind(AssertUnwindSafe(|| {
            run_by(parallel, 4, &|| {
                let call = calls.fetch_add(1, Ordering::Relaxed);
                assert!(call.is_multiple_of(2), "call {call}");
            });
        }));
        assert_eq!(calls.into_inner(), 4);
        let said = ended.unwrap_err().downcast::<String>().unwrap();
        assert!(["call 1", "call 3"].contains(&said.as_str()), "{said}");
    }
}
