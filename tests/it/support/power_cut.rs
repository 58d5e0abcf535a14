//! What a power cut leaves of a disk: all that was synced, and any part of what was not.

use std::ops::Range;

/// The unit in which a disk writes.
const SECTOR: usize = 512;

/// Something done to a disk.
#[derive(Clone, Debug)]
pub enum Change {
    Write { offset: usize, data: Vec<u8> },
    SetLen(usize),
}

impl Change {
    /// Bytes beyond the end go nowhere: the length that would show them was lost.
    pub fn apply(&self, image: &mut Vec<u8>) {
        match self {
            Self::Write { offset, data } => write(image, *offset, data),
            Self::SetLen(length) => image.resize(*length, 0),
        }
    }

    /// Does a part of it: nothing, all, its first bytes, or some of its sectors.
    fn apply_torn(&self, image: &mut Vec<u8>, chance: &mut Chance) {
        match (self, chance.below(4)) {
            (_, 0) => {}
            (Self::Write { offset, data }, 1) => {
                write(image, *offset, &data[..chance.below(data.len() + 1)]);
            }
            (Self::Write { offset, data }, 2) => {
                for sector in sectors(*offset, data.len()) {
                    if chance.below(2) == 0 {
                        write(image, offset + sector.start, &data[sector]);
                    }
                }
            }
            _ => self.apply(image),
        }
    }
}

fn write(image: &mut [u8], offset: usize, data: &[u8]) {
    let end = image.len().min(offset + data.len());
    if let Some(place) = image.get_mut(offset..end) {
        place.copy_from_slice(&data[..place.len()]);
    }
}

/// Where the sectors lie in `length` bytes that are written at `offset`.
fn sectors(offset: usize, length: usize) -> impl Iterator<Item = Range<usize>> {
    let mut start = 0;
    std::iter::from_fn(move || {
        let end = length.min(start + SECTOR - (offset + start) % SECTOR);
        let sector = start..end;
        start = end;
        (!sector.is_empty()).then_some(sector)
    })
}

/// A disk at the moment of a power cut.
#[derive(Debug)]
pub struct PowerCut {
    pub durable: Vec<u8>,
    pub unsynced: Vec<Change>,
}

impl PowerCut {
    /// What may be found afterwards: none of what was not synced, all of it, and two parts of it by
    /// chance.
    pub fn images(&self, seed: u64) -> Vec<Vec<u8>> {
        let mut images = vec![self.durable.clone()];
        if !self.unsynced.is_empty() {
            let mut chance = Chance(seed);
            images.push(self.whole());
            images.push(self.torn(&mut chance));
            images.push(self.torn(&mut chance));
        }
        images
    }

    fn whole(&self) -> Vec<u8> {
        let mut image = self.durable.clone();
        for change in &self.unsynced {
            change.apply(&mut image);
        }
        image
    }

    /// A part by chance.
    pub fn torn(&self, chance: &mut Chance) -> Vec<u8> {
        let mut image = self.durable.clone();
        for change in &self.unsynced {
            change.apply_torn(&mut image, chance);
        }
        image
    }
}

/// Numbers that look random and are the same each time (splitmix64).
#[derive(Debug)]
pub struct Chance(pub u64);

impl Chance {
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % bound.max(1) as u64) as usize
    }
}
