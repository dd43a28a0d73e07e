//! Interleaved rANS: an entropy coder with static tables, 64 lanes of one stream side by side.
//!
//! A *stream* codes a sequence of *runs*; all symbols of a run (bytes) share one table, and the decoder knows tables and
//! lengths. Symbol `j` of a run goes through lane `j mod 64`, so that eight lanes fill a vector and eight vectors hide
//! each other's latency. States are 31 bits, renormalised by 16-bit words; probabilities have 12 bits. The encoder runs
//! backwards, so that the decoder reads words in rising order:
//!
//! ```text
//! stream = states u32 little-endian × 64 ‖ words u16 little-endian × n
//! ```
//!
//! A table with a single symbol costs nothing. Whatever the bytes, the decoder reads within them and writes symbols of
//! the table; a stream that does not end exactly where its encoder began is an error. Vector and scalar code give the
//! same bytes and the same symbols. The construction follows J. Duda, "Asymmetric numeral systems" (arXiv 1311.2540), in
//! the word-wise interleaved form of F. Giesen (arXiv 1402.3392).

use std::fmt;

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod avx2;

/// Lanes of a stream.
pub const LANES: usize = 64;
/// Bits of a probability.
pub const BITS: u32 = 12;
/// Sum of a table's frequencies.
pub const TOTAL: u32 = 1 << BITS;
/// Bytes of a stream that codes nothing: the states.
pub const OVERHEAD: usize = 4 * LANES;
/// Every state is at least this between two symbols; it is also the state that the encoder begins with.
const LOW: u32 = 1 << 15;

/// Why a table can't be made or a stream can't be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Error {
    /// Frequencies that don't add up to `TOTAL`; the sum.
    Frequencies(u32),
    /// The stream ends before its last symbol.
    Truncated,
    /// The stream goes on behind its last symbol, or its states are not the encoder's: it is damaged, or was coded with
    /// other tables.
    Damaged,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Frequencies(sum) => write!(f, "frequencies add up to {sum} instead of {TOTAL}"),
            Error::Truncated => f.write_str("entropy-coded stream ends before its last symbol"),
            Error::Damaged => {
                f.write_str("entropy-coded stream is damaged or was coded with other tables")
            }
        }
    }
}

impl std::error::Error for Error {}

/// Frequencies of up to 256 symbols that add up to [`TOTAL`], ready to encode and to decode.
#[derive(Clone)]
pub struct Table {
    frequencies: [u16; 256],
    /// By symbol: reciprocal of the frequency, and start | frequency << 16, and shift: see `Step`.
    steps: Box<[Step; 256]>,
    /// By the low `BITS` of a state: symbol | (slot − start) << 8 | (frequency mod TOTAL) << 20.
    slots: Box<[u32; TOTAL as usize]>,
    /// The only symbol, if there is one: such runs take no space.
    only: Option<u8>,
}

/// How the encoder advances by one symbol: `x → x + start + (x / frequency) × (TOTAL − frequency)`, the division as
/// `(x × reciprocal) >> 32 >> shift` (exact below 2³¹). A frequency of 1 takes `reciprocal = 2³² − 1`, which gives x − 1,
/// and the start makes up for it.
#[derive(Clone, Copy, Default)]
#[repr(C, align(16))]
struct Step {
    reciprocal: u32,
    start: u32,
    /// frequency | shift << 16
    rest: u32,
    unused: u32,
}

impl Step {
    fn new(start: u32, frequency: u32) -> Self {
        if frequency < 2 {
            return Step {
                reciprocal: u32::MAX,
                start: start + TOTAL - 1,
                rest: frequency,
                unused: 0,
            };
        }
        let shift = u32::BITS - (frequency - 1).leading_zeros();
        let reciprocal = (1_u64 << (shift + 31)).div_ceil(u64::from(frequency)) as u32;
        Step {
            reciprocal,
            start,
            rest: frequency | (shift - 1) << 16,
            unused: 0,
        }
    }

    #[inline(always)]
    fn frequency(self) -> u32 {
        self.rest & 0xffff
    }

    #[inline(always)]
    fn advance(self, x: u32) -> u32 {
        let quotient =
            ((u64::from(x) * u64::from(self.reciprocal)) >> 32) as u32 >> (self.rest >> 16);
        x.wrapping_add(self.start)
            .wrapping_add(quotient.wrapping_mul(TOTAL - self.frequency()))
    }
}

impl Table {
    /// A table of given frequencies; symbols of frequency 0 can't be coded.
    ///
    /// # Errors
    /// [`Error::Frequencies`] unless they add up to [`TOTAL`].
    pub fn new(frequencies: &[u16; 256]) -> Result<Self, Error> {
        let sum: u32 = frequencies.iter().map(|&f| u32::from(f)).sum();
        if sum != TOTAL {
            return Err(Error::Frequencies(sum));
        }
        let only = frequencies
            .iter()
            .position(|&f| u32::from(f) == TOTAL)
            .map(|s| s as u8);
        let mut steps = Box::new([Step::default(); 256]);
        let mut slots = Box::new([0_u32; TOTAL as usize]);
        let mut start = 0;
        for (symbol, &frequency) in frequencies.iter().enumerate() {
            let frequency = u32::from(frequency);
            if frequency == 0 {
                continue;
            }
            steps[symbol] = Step::new(start, frequency);
            for within in 0..frequency {
                // A frequency of TOTAL would not fit; such a table never reaches the decoder.
                slots[(start + within) as usize] =
                    symbol as u32 | within << 8 | (frequency % TOTAL) << 20;
            }
            start += frequency;
        }
        Ok(Table {
            frequencies: *frequencies,
            steps,
            slots,
            only,
        })
    }

    /// The table that codes `counts` in the fewest bits: every symbol that occurs gets a frequency of at least 1. With no
    /// counts at all it codes the symbol 0 only.
    #[must_use]
    pub fn of_counts(counts: &[u64; 256]) -> Self {
        let mut frequencies = [0; 256];
        normalise(counts, &mut frequencies);
        // The sum is TOTAL by construction.
        Table::new(&frequencies).unwrap_or_else(|error| unreachable!("{error}"))
    }

    /// The table that codes `symbols` in the fewest bits.
    #[must_use]
    pub fn of_symbols(symbols: &[u8]) -> Self {
        let mut counts = [0; 256];
        for &symbol in symbols {
            counts[usize::from(symbol)] += 1;
        }
        Table::of_counts(&counts)
    }

    /// Frequency of every symbol.
    #[must_use]
    pub fn frequencies(&self) -> &[u16; 256] {
        &self.frequencies
    }

    /// The only symbol, if there is no other.
    #[must_use]
    pub fn only(&self) -> Option<u8> {
        self.only
    }

    /// Whether every symbol of `run` can be coded.
    #[must_use]
    pub fn covers(&self, run: &[u8]) -> bool {
        run.iter()
            .all(|&symbol| self.frequencies[usize::from(symbol)] > 0)
    }
}

impl fmt::Debug for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let used = self.frequencies.iter().enumerate().filter(|(_, f)| **f > 0);
        f.debug_map().entries(used).finish()
    }
}

/// Scale `counts` to frequencies that add up to `TOTAL`: the ideal share rounded down, at least 1, then the rest given
/// (or taken back) one by one where it saves (or costs) the most bits.
fn normalise(counts: &[u64; 256], frequencies: &mut [u16; 256]) {
    let sum: u128 = counts.iter().map(|&c| u128::from(c)).sum();
    if sum == 0 {
        frequencies[0] = TOTAL as u16;
        return;
    }
    let mut left = i64::from(TOTAL);
    for (frequency, &count) in frequencies.iter_mut().zip(counts) {
        if count > 0 {
            *frequency = (u128::from(count) * u128::from(TOTAL) / sum).max(1) as u16;
            left -= i64::from(*frequency);
        }
    }
    let gain =
        |count: u64, from: u16, to: u16| count as f64 * (f64::from(to) / f64::from(from)).ln();
    while left != 0 {
        let step = left.signum();
        let best = (0..256)
            .filter(|&s| counts[s] > 0 && (step > 0 || frequencies[s] > 1))
            .map(|s| {
                (
                    gain(
                        counts[s],
                        frequencies[s],
                        (i64::from(frequencies[s]) + step) as u16,
                    ),
                    s,
                )
            })
            .max_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1)));
        // 256 symbols can't all be above their share, nor all at 1, while the sum differs from TOTAL.
        let Some((_, symbol)) = best else {
            unreachable!("no symbol can change")
        };
        frequencies[symbol] = (i64::from(frequencies[symbol]) + step) as u16;
        left -= step;
    }
}

/// Size of a symbol of this frequency in 1/256 bits, rounded up; of one that can't be coded, more than of any others. By
/// integers alone, so that what is decided by it is the same everywhere.
#[must_use]
pub fn cost(frequency: u16) -> u32 {
    if frequency == 0 {
        return 1 << 20;
    }
    let whole = u32::from(frequency).ilog2();
    // The fraction of the logarithm, bit by bit: squaring doubles it.
    let (mut x, mut log) = (u64::from(frequency) << (31 - whole), whole);
    for _ in 0..8 {
        x = (x * x) >> 31;
        let bit = (x >> 32) as u32;
        log = 2 * log + bit;
        x >>= bit;
    }
    256 * BITS - log
}

/// Append the stream of `runs` to `out`. Every symbol must be one of its table's ([`Table::covers`]); the stream of
/// others does not decode to them.
pub fn encode(runs: &[(&Table, &[u8])], out: &mut Vec<u8>) {
    encode_with(runs, out, vectors());
}

/// Decode the stream `bytes` into `runs`.
///
/// # Errors
/// [`Error::Truncated`] or [`Error::Damaged`] for bytes that `encode` didn't make of runs of these tables and lengths;
/// the runs hold arbitrary symbols then.
pub fn decode(runs: &mut [(&Table, &mut [u8])], bytes: &[u8]) -> Result<(), Error> {
    decode_with(runs, bytes, vectors())
}

/// [`encode`] with vectors (where the processor has AVX2) or without, whatever the processor has.
pub fn encode_with(runs: &[(&Table, &[u8])], out: &mut Vec<u8>, vectors: bool) {
    debug_assert!(
        runs.iter().all(|(table, run)| table.covers(run)),
        "a symbol is not in its table"
    );
    let symbols: usize = runs
        .iter()
        .filter(|(t, _)| t.only.is_none())
        .map(|(_, run)| run.len())
        .sum();
    // Each symbol takes one word at most; vectors write whole ones, a vector's width beyond.
    let mut words = Words::new(symbols);
    let mut states = [LOW; LANES];
    for (table, run) in runs.iter().rev().filter(|(table, _)| table.only.is_none()) {
        let whole = run.len() / LANES * LANES;
        encode_group(table, &run[whole..], &mut states, &mut words);
        #[cfg(target_arch = "x86_64")]
        if vectors && self::vectors() {
            #[allow(unsafe_code)]
            // SAFETY: the processor has AVX2 and POPCNT, and `words` has room for one word a symbol.
            unsafe {
                avx2::encode(table, &run[..whole], &mut states, &mut words)
            };
            continue;
        }
        let _ = vectors;
        for group in run[..whole].chunks_exact(LANES).rev() {
            encode_group(table, group, &mut states, &mut words);
        }
    }
    out.reserve(OVERHEAD + 2 * words.written().len());
    for state in states {
        out.extend_from_slice(&state.to_le_bytes());
    }
    for word in words.written() {
        out.extend_from_slice(&word.to_le_bytes());
    }
}

/// [`decode`] with vectors (where the processor has AVX2) or without, whatever the processor has.
///
/// # Errors
/// As [`decode`].
pub fn decode_with(
    runs: &mut [(&Table, &mut [u8])],
    bytes: &[u8],
    vectors: bool,
) -> Result<(), Error> {
    let mut decoder = Decoder::with(bytes, vectors)?;
    for (table, run) in runs {
        decoder.run(table, run)?;
    }
    decoder.finish()
}

/// A stream on its way to symbols, run by run, so that what one run says may decide of the tables of later ones.
#[derive(Debug)]
pub struct Decoder<'a> {
    states: [u32; LANES],
    words: &'a [u8],
    vectors: bool,
}

impl<'a> Decoder<'a> {
    /// Of the stream `bytes`.
    ///
    /// # Errors
    /// [`Error::Truncated`] or [`Error::Damaged`] if it does not begin with states.
    pub fn new(bytes: &'a [u8]) -> Result<Self, Error> {
        Self::with(bytes, vectors())
    }

    fn with(bytes: &'a [u8], vectors: bool) -> Result<Self, Error> {
        let (head, words) = bytes.split_at_checked(OVERHEAD).ok_or(Error::Truncated)?;
        let mut states = [0; LANES];
        for (state, bytes) in states.iter_mut().zip(head.as_chunks::<4>().0) {
            *state = u32::from_le_bytes(*bytes);
        }
        if states.iter().any(|state| !(LOW..LOW << 16).contains(state)) {
            return Err(Error::Damaged);
        }
        Ok(Decoder {
            states,
            words,
            vectors: vectors && self::vectors(),
        })
    }

    /// Fills `run` with the next symbols.
    ///
    /// # Errors
    /// [`Error::Truncated`]; the symbols are arbitrary then.
    pub fn run(&mut self, table: &Table, run: &mut [u8]) -> Result<(), Error> {
        if let Some(symbol) = table.only {
            run.fill(symbol);
            return Ok(());
        }
        let mut done = 0;
        #[cfg(target_arch = "x86_64")]
        if self.vectors {
            #[allow(unsafe_code)]
            // SAFETY: the processor has AVX2 and POPCNT.
            let decoded = unsafe { avx2::decode(table, run, &mut self.states, &mut self.words) };
            done = decoded;
        }
        for group in run[done..].chunks_mut(LANES) {
            decode_group(table, group, &mut self.states, &mut self.words)?;
        }
        Ok(())
    }

    /// Proves that the stream ends here.
    ///
    /// # Errors
    /// [`Error::Damaged`] if it doesn't, or if its encoder did not begin so: the symbols are not what was encoded.
    pub fn finish(self) -> Result<(), Error> {
        if self.words.is_empty() && self.states == [LOW; LANES] {
            Ok(())
        } else {
            Err(Error::Damaged)
        }
    }
}

/// Whether this processor has the vectors that the fast paths use.
#[must_use]
pub fn vectors() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("avx2")
        && std::arch::is_x86_feature_detected!("popcnt");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Words that are written from the back to the front.
struct Words {
    words: Vec<u16>,
    first: usize,
}

impl Words {
    /// Elements that a vector may write in front of the words that it means.
    const SLACK: usize = 8;

    fn new(room: usize) -> Self {
        let words = vec![0; room + Self::SLACK];
        Words {
            first: words.len(),
            words,
        }
    }

    fn push_front(&mut self, word: u16) {
        self.first -= 1;
        self.words[self.first] = word;
    }

    fn written(&self) -> &[u16] {
        &self.words[self.first..]
    }
}

#[inline]
fn encode_group(table: &Table, group: &[u8], states: &mut [u32; LANES], words: &mut Words) {
    for (state, &symbol) in states.iter_mut().zip(group).rev() {
        let step = table.steps[usize::from(symbol)];
        // Below this, one step leaves the state below 2³¹.
        if *state >= step.frequency() << (31 - BITS) {
            words.push_front(*state as u16);
            *state >>= 16;
        }
        *state = step.advance(*state);
    }
}

#[inline]
fn decode_group(
    table: &Table,
    group: &mut [u8],
    states: &mut [u32; LANES],
    words: &mut &[u8],
) -> Result<(), Error> {
    for (state, symbol) in states.iter_mut().zip(group) {
        let slot = table.slots[(*state % TOTAL) as usize];
        *symbol = slot as u8;
        let mut x = (slot >> 20) * (*state >> BITS) + (slot >> 8 & (TOTAL - 1));
        if x < LOW {
            let (word, rest) = words.split_first_chunk::<2>().ok_or(Error::Truncated)?;
            x = x << 16 | u32::from(u16::from_le_bytes(*word));
            *words = rest;
        }
        *state = x;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
