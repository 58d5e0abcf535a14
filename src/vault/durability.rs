//! `Durability`: when a change is on disk.

use std::time::Duration;

/// When what a call answers is on disk.
///
/// | what happens | [`Committed`](Self::Committed) loses | [`Buffered`](Self::Buffered) loses |
/// |---|---|---|
/// | the last handle is dropped, or [`close`](super::Vault::close) | nothing | nothing |
/// | the process is killed, or the machine loses power | nothing that was answered | what no completed flush carried: the last `flush_every` and the time a flush takes, more if that is long, see [`flush_every`](Self::Buffered::flush_every); while the disk refuses, everything since it began to |
///
/// Choose `Committed` for what an attacker would like forgotten and that is checked at most some
/// thousand times a second: logins, password resets, paid calls. Choose `Buffered` where a check has
/// to cost no more than one in memory, and a crash may forgive the last moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Durability {
    /// A call returns after its transaction is on disk.
    #[default]
    Committed,
    /// A call is decided in memory; one transaction per interval carries what changed to the disk.
    Buffered {
        /// How long a change may wait until it is carried to the disk, at least 1 ms.
        ///
        /// A flush is followed by a rest that is twice as long, at most 5 s: the processor and the
        /// disk are there for others too. So after one that takes more than a third of `flush_every`,
        /// because of very many rows or a slow disk, the next comes later than that.
        flush_every: Duration,
    },
}
