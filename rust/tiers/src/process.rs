//! The process that threads, files and connections belong to. A child made by `fork` has none of the threads, and would write
//! into its parent's files and read its parent's replies: it must leave them alone.

/// Remembers the process that made it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owner(u32);

impl Owner {
    pub(crate) fn this() -> Self {
        Self(std::process::id())
    }

    /// False in a child that was forked since.
    pub(crate) fn is_this(self) -> bool {
        self.0 == std::process::id()
    }
}
