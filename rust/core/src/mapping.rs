//! Anonymous memory mappings: address space at once, memory as it is touched, zeros until then.

use std::marker::PhantomData;
use std::ops::Deref;

use crate::error::{Error, Result};

const HUGE_PAGE: usize = 2 << 20;

/// A range of zeroed memory, aligned to huge pages and using them where there are some.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: *mut u8,
    len: usize,
    mapped: *mut libc::c_void,
    mapped_len: usize,
}

// SAFETY: the mapping is plain memory that stays until drop; what may be done with it is for its owner to say.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(crate) fn new(len: usize) -> Result<Self> {
        let no_memory = |reason: String| Error::NoMemory { bytes: len, reason };
        let mapped_len = len
            .checked_add(HUGE_PAGE)
            .filter(|&n| n <= isize::MAX as usize);
        let mapped_len =
            mapped_len.ok_or_else(|| no_memory("larger than the address space".into()))?;
        // SAFETY: a fresh anonymous mapping at an address of the system's choice touches nothing that exists.
        let mapped = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                mapped_len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if mapped == libc::MAP_FAILED {
            return Err(no_memory(std::io::Error::last_os_error().to_string()));
        }
        let skip = mapped.cast::<u8>().align_offset(HUGE_PAGE);
        // SAFETY: less than HUGE_PAGE is skipped, and that much more than `len` was mapped.
        let base = unsafe { mapped.cast::<u8>().add(skip) };
        #[cfg(target_os = "linux")]
        // SAFETY: advice on a range of our own mapping; a refusal is harmless.
        unsafe {
            libc::madvise(base.cast(), len, libc::MADV_HUGEPAGE);
        }
        Ok(Self {
            base,
            len,
            mapped,
            mapped_len,
        })
    }

    pub(crate) fn base(&self) -> *mut u8 {
        self.base
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: ours, unmapped once; nobody keeps a pointer into it longer than its owner.
        unsafe { libc::munmap(self.mapped, self.mapped_len) };
    }
}

/// Types for which zeroed memory is a value, and that need no drop.
///
/// # Safety
/// As the name says.
pub(crate) unsafe trait Zeroed: Sync {}

/// An array in a mapping, all zeros at first.
#[derive(Debug)]
pub(crate) struct Table<T: Zeroed> {
    mapping: Mapping,
    len: usize,
    items: PhantomData<T>,
}

impl<T: Zeroed> Table<T> {
    pub(crate) fn new(len: usize) -> Result<Self> {
        const { assert!(align_of::<T>() <= HUGE_PAGE && !std::mem::needs_drop::<T>()) };
        let mapping = Mapping::new(len.saturating_mul(size_of::<T>()))?;
        Ok(Self {
            mapping,
            len,
            items: PhantomData,
        })
    }
}

impl<T: Zeroed> Deref for Table<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the mapping has room for `len` items, is aligned, zeroed, and used through shared references only.
        unsafe { std::slice::from_raw_parts(self.mapping.base.cast(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // SAFETY: an integer.
    unsafe impl Zeroed for u64 {}

    /// Tables far larger than memory cost nothing until touched; they are aligned and zeroed.
    #[test]
    fn tables_are_lazy_and_zeroed() {
        let table = Table::<u64>::new(1 << 37).expect("address space");
        assert_eq!(table.len(), 1 << 37);
        assert_eq!((table[0], table[(1 << 37) - 1]), (0, 0));
        assert!(table.as_ptr().cast::<u8>().align_offset(HUGE_PAGE) == 0);
    }

    /// What the system can't map is an error that says how much was asked for.
    #[test]
    fn too_much_is_an_error() {
        let error = Mapping::new(usize::MAX / 4).expect_err("no such address space");
        assert!(
            matches!(error, Error::NoMemory { bytes, .. } if bytes == usize::MAX / 4),
            "{error}"
        );
    }
}
