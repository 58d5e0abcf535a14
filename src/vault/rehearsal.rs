//! A rehearsal: opening a database for writing without writing to its file.
//!
//! redb cannot look into a file that a crash left without recovering it first. So it recovers it
//! here, in memory: what it writes is kept in blocks in front of the file, and goes with them. The
//! locks are the file's own, so that nobody else writes to it meanwhile.

use std::collections::HashMap;
use std::io;
use std::ops::{Bound, Range};
use std::sync::{Mutex, MutexGuard, PoisonError};

use redb::{BackendError, StorageBackend};

const BLOCK: usize = 4_096;

/// A storage whose writes stay in memory.
#[derive(Debug)]
pub(super) struct Rehearsal<B> {
    file: B,
    memory: Mutex<Memory>,
}

#[derive(Debug, Default)]
struct Memory {
    /// `None`: the length was not changed.
    length: Option<u64>,
    /// The shortest length it was set to: what the file holds beyond it is gone.
    shortest: Option<u64>,
    blocks: HashMap<u64, Vec<u8>>,
}

impl<B: StorageBackend> Rehearsal<B> {
    pub(super) fn new(file: B) -> Self {
        Self {
            file,
            memory: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file's own bytes of a block that was not written.
    fn load(&self, memory: &Memory, number: u64) -> io::Result<Vec<u8>> {
        let start = number.saturating_mul(BLOCK as u64);
        let end = self.file.len()?.min(memory.shortest.unwrap_or(u64::MAX));
        let count = usize::try_from(end.saturating_sub(start)).unwrap_or(BLOCK);
        let mut block = vec![0; count.min(BLOCK)];
        if !block.is_empty() {
            self.file.read(start, &mut block)?;
        }
        block.resize(BLOCK, 0);
        Ok(block)
    }
}

/// The blocks that `length` bytes from `offset` on lie in: the number of each, and which of its bytes
/// are which of the bytes asked for.
fn stretches(
    offset: u64,
    length: usize,
) -> impl Iterator<Item = (u64, Range<usize>, Range<usize>)> {
    let first = offset / BLOCK as u64;
    let skipped = usize::try_from(offset % BLOCK as u64).unwrap_or(0);
    let blocks = (skipped + length).div_ceil(BLOCK);
    (first..).zip(0..blocks).map(move |(number, block)| {
        // Counted from the start of the first block.
        let from = (block * BLOCK).max(skipped);
        let to = ((block + 1) * BLOCK).min(skipped + length);
        let start = block * BLOCK;
        (
            number,
            from - start..to - start,
            from - skipped..to - skipped,
        )
    })
}

impl<B: StorageBackend> StorageBackend for Rehearsal<B> {
    fn len(&self) -> io::Result<u64> {
        let length = self.lock().length;
        length.map_or_else(|| self.file.len(), Ok)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let memory = self.lock();
        for (number, within, asked) in stretches(offset, out.len()) {
            let loaded;
            let block = match memory.blocks.get(&number) {
                Some(block) => block,
                None => {
                    loaded = self.load(&memory, number)?;
                    &loaded
                }
            };
            if let (Some(out), Some(bytes)) = (out.get_mut(asked), block.get(within)) {
                out.copy_from_slice(bytes);
            }
        }
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut memory = self.lock();
        for (number, within, given) in stretches(offset, data.len()) {
            if !memory.blocks.contains_key(&number) {
                let block = self.load(&memory, number)?;
                memory.blocks.insert(number, block);
            }
            let block = memory.blocks.entry(number).or_default();
            if let (Some(place), Some(bytes)) = (block.get_mut(within), data.get(given)) {
                place.copy_from_slice(bytes);
            }
        }
        Ok(())
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        let mut memory = self.lock();
        let shortest = memory.shortest.unwrap_or(u64::MAX).min(length);
        memory.shortest = Some(shortest);
        memory.length = Some(length);
        let kept = length.div_ceil(BLOCK as u64);
        memory.blocks.retain(|number, _| *number < kept);
        let within = usize::try_from(length % BLOCK as u64).map_err(io::Error::other)?;
        let last = memory.blocks.get_mut(&(length / BLOCK as u64));
        if let Some(cut_off) = last.and_then(|block| block.get_mut(within..)) {
            cut_off.fill(0);
        }
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn close(&self) -> io::Result<()> {
        self.file.close()
    }

    fn try_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.file.try_lock_range(start, end)
    }

    fn try_lock_shared_range(
        &self,
        start: Bound<u64>,
        end: Bound<u64>,
    ) -> Result<bool, BackendError> {
        self.file.try_lock_shared_range(start, end)
    }

    fn lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.file.lock_range(start, end)
    }

    fn lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.file.lock_shared_range(start, end)
    }

    fn unlock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.file.unlock_range(start, end)
    }

    fn query_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.file.query_lock_range(start, end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use redb::backends::InMemoryBackend;

    #[derive(Clone, Debug)]
    enum Step {
        Write(usize, usize, u8),
        SetLen(usize),
    }

    const LONGEST: usize = 4 * BLOCK;

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let write = (0..LONGEST, 1..2 * BLOCK, 1_u8..);
        let step = prop_oneof![
            4 => write.prop_map(|(offset, length, byte)| Step::Write(offset, length, byte)),
            1 => (0..LONGEST).prop_map(Step::SetLen),
        ];
        prop::collection::vec(step, 1..12)
    }

    proptest! {
        #[test]
        fn it_reads_as_if_written_and_the_file_stays_as_it_was(
            length in 0..LONGEST,
            steps in steps(),
        ) {
            let original: Vec<u8> = (1..=255).cycle().take(length).collect();
            let file = InMemoryBackend::new();
            file.set_len(original.len() as u64).expect("a length");
            file.write(0, &original).expect("a write");
            let rehearsal = Rehearsal::new(file);
            let mut plain = original.clone();
            for step in steps {
                match step {
                    Step::Write(offset, length, byte) => {
                        let room = plain.len().saturating_sub(offset);
                        let data = vec![byte; length.min(room)];
                        if data.is_empty() {
                            continue;
                        }
                        rehearsal.write(offset as u64, &data).expect("a write");
                        plain[offset..offset + data.len()].copy_from_slice(&data);
                    }
                    Step::SetLen(length) => {
                        rehearsal.set_len(length as u64).expect("a length");
                        plain.resize(length, 0);
                    }
                }
                let mut found = vec![0; plain.len()];
                rehearsal.read(0, &mut found).expect("a read");
                prop_assert_eq!(&found, &plain);
                prop_assert_eq!(rehearsal.len().expect("a length"), plain.len() as u64);
            }
            let mut found = vec![0; original.len()];
            rehearsal.file.read(0, &mut found).expect("a read");
            prop_assert_eq!(found, original);
        }
    }
}
