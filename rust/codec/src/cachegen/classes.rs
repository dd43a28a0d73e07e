//! With which class's table each component of a chain is coded: that of its own class, or of one a little wider or
//! narrower, whichever suits this record best. Tables learnt from other prompts fit a single one only on average.

use std::ops::Range;
use std::sync::LazyLock;

use crate::coder::CodecError;
use crate::rans::{self, Table};
use crate::tables::Tables;

/// How far, up and down, a component's table may be from its own class's.
const REACH: usize = 4;

/// The difference to its own class.
pub(super) const SAME: u8 = REACH as u8;

/// Codes the differences −REACH … REACH.
static DIFFERENCES: LazyLock<Table> = LazyLock::new(|| {
    let mut frequencies = [0; 256];
    frequencies[..=2 * REACH].copy_from_slice(&[40, 100, 250, 800, 1716, 800, 250, 100, 40]);
    // These add up to what a table asks for.
    Table::new(&frequencies).unwrap_or_else(|error| unreachable!("{error}"))
});

/// The table of the differences.
pub(super) fn table() -> &'static Table {
    &DIFFERENCES
}

/// Own class of every component of a chain, in the order `[layer][block][component]`.
pub(super) fn own(tables: &Tables, chain: usize) -> Vec<usize> {
    let layers = tables.bases.iter().skip(chain * tables.chain);
    layers
        .take(tables.chain)
        .flat_map(|layer| &layer.blocks)
        .flat_map(|block| &block.runs)
        .flat_map(|&(class, count)| std::iter::repeat_n(class, count))
        .collect()
}

/// The difference that codes `symbols` of a component in the fewest bits.
pub(super) fn cheapest(tables: &Tables, own: usize, symbols: &[u8]) -> u8 {
    let mut counts = [0_u32; 256];
    for symbol in symbols {
        counts[usize::from(*symbol)] += 1;
    }
    let occur = |symbol: &usize| counts[*symbol] > 0;
    let first = (0..256).find(occur).unwrap_or(0);
    let last = (0..256).rev().find(occur).unwrap_or(0);
    let cost = |difference: usize| {
        let costs = &tables.classes[chosen(tables, own, difference)?].costs[first..=last];
        let symbols: u64 = counts[first..=last]
            .iter()
            .zip(costs)
            .map(|(count, cost)| u64::from(*count) * u64::from(*cost))
            .sum();
        Some(symbols + u64::from(rans::cost(DIFFERENCES.frequencies()[difference])))
    };
    let found = (0..=2 * REACH)
        .filter_map(|difference| Some((cost(difference)?, difference)))
        .min();
    found.map_or(SAME, |(_, difference)| difference as u8)
}

/// The class that a difference leads to, if there is one that codes more than zeros.
pub(super) fn chosen(tables: &Tables, own: usize, difference: usize) -> Option<usize> {
    let class = (own + difference).checked_sub(REACH)?;
    (!tables.classes.get(class)?.is_zero()).then_some(class)
}

/// Where the symbols of each component stand in a stream, which is sorted by class.
pub(super) struct Order {
    /// (class, symbols of all its components)
    pub(super) runs: Vec<(usize, Range<usize>)>,
    /// First symbol of each component.
    pub(super) starts: Vec<usize>,
}

impl Order {
    /// Of components with `kept` symbols each, as differences say.
    ///
    /// # Errors
    /// For a difference that leads nowhere.
    pub(super) fn new(
        tables: &Tables,
        own: &[usize],
        differences: &[u8],
        kept: usize,
    ) -> Result<Self, CodecError> {
        let classes = own
            .iter()
            .zip(differences)
            .map(|(own, difference)| chosen(tables, *own, usize::from(*difference)))
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| CodecError("a component has a class that does not exist".into()))?;
        let mut sizes = vec![0; tables.classes.len()];
        classes.iter().for_each(|class| sizes[*class] += kept);
        let (mut runs, mut next, mut at) = (vec![], vec![0; sizes.len()], 0);
        for (class, size) in sizes.into_iter().enumerate().filter(|(_, size)| *size > 0) {
            next[class] = at;
            runs.push((class, at..at + size));
            at += size;
        }
        let starts = classes
            .iter()
            .map(|class| {
                next[*class] += kept;
                next[*class] - kept
            })
            .collect();
        Ok(Order { runs, starts })
    }
}
