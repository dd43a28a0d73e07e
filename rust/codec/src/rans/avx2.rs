//! Whole groups of 64 symbols with AVX2: eight vectors of eight lanes. Same bytes as the scalar code.

use std::arch::x86_64::*;

use super::{BITS, LANES, LOW, Step, TOTAL, Table, Words};

/// By mask of lanes: where lane i takes its word from, the words of the lanes in the mask lying one after the other.
static SPREAD: [[u8; 16]; 256] = spread();
/// By mask of lanes: the words of the lanes in the mask, moved together at the upper end.
static GATHER: [[u8; 16]; 256] = gather();

const fn spread() -> [[u8; 16]; 256] {
    let mut all = [[0x80; 16]; 256];
    let mut mask = 0;
    while mask < 256 {
        let (mut lane, mut word) = (0, 0);
        while lane < 8 {
            if mask >> lane & 1 == 1 {
                all[mask][2 * lane] = 2 * word;
                all[mask][2 * lane + 1] = 2 * word + 1;
                word += 1;
            }
            lane += 1;
        }
        mask += 1;
    }
    all
}

const fn gather() -> [[u8; 16]; 256] {
    let mut all = [[0x80; 16]; 256];
    let mut mask = 0;
    while mask < 256 {
        let (mut lane, mut at) = (8, 8);
        while lane > 0 {
            lane -= 1;
            if mask >> lane & 1 == 1 {
                at -= 1;
                all[mask][2 * at] = 2 * lane as u8;
                all[mask][2 * at + 1] = 2 * lane as u8 + 1;
            }
        }
        mask += 1;
    }
    all
}

/// All lanes, as vectors.
#[target_feature(enable = "avx2")]
#[inline]
fn loaded(states: &[u32; LANES]) -> [[__m256i; 4]; 2] {
    let (states, _) = states.as_chunks::<8>();
    // SAFETY: every load is of eight states.
    let load = |v: usize| unsafe { _mm256_loadu_si256(states[v].as_ptr().cast()) };
    [
        [load(0), load(1), load(2), load(3)],
        [load(4), load(5), load(6), load(7)],
    ]
}

/// The other way round.
#[target_feature(enable = "avx2")]
#[inline]
fn stored(x: &[[__m256i; 4]; 2], states: &mut [u32; LANES]) {
    for (x, states) in x.as_flattened().iter().zip(states.as_chunks_mut::<8>().0) {
        // SAFETY: every store is of eight states.
        unsafe { _mm256_storeu_si256(states.as_mut_ptr().cast(), *x) };
    }
}

/// Decode the first whole groups of `run`, as long as the words surely suffice; returns the symbols decoded.
///
/// # Safety
/// The processor must have AVX2 and POPCNT.
#[target_feature(enable = "avx2,popcnt")]
pub(super) unsafe fn decode(
    table: &Table,
    run: &mut [u8],
    states: &mut [u32; LANES],
    words: &mut &[u8],
) -> usize {
    let slots = table.slots.as_ptr().cast::<i32>();
    let mut at = 0;
    let bytes = *words;
    let (groups, _) = run.as_chunks_mut::<LANES>();
    let mut done = 0;
    let [mut low, mut high] = loaded(states);
    for group in groups {
        if bytes.len() - at < 2 * LANES {
            break;
        }
        // SAFETY: every state's low bits are below TOTAL, the length of `slots`. A group takes at most LANES words, and
        // the last vector of a group reads 16 bytes from at most 2 × 56 bytes on: all stay within the 128 bytes that
        // were made sure of. The stores fill the group.
        unsafe {
            let first = decode_half(slots, &mut low, bytes.as_ptr(), &mut at);
            _mm256_storeu_si256(group.as_mut_ptr().cast(), first);
            let second = decode_half(slots, &mut high, bytes.as_ptr(), &mut at);
            _mm256_storeu_si256(group.as_mut_ptr().add(LANES / 2).cast(), second);
        }
        done += LANES;
    }
    stored(&[low, high], states);
    *words = &bytes[at..];
    done
}

/// The next symbols of 32 lanes, whose words begin at `at`. Both halves of a group are apart in the code, so that all
/// states stay in registers.
///
/// # Safety
/// The processor must have AVX2 and POPCNT; `slots` must have TOTAL entries, `bytes` 64 bytes behind `at`.
#[target_feature(enable = "avx2,popcnt")]
#[inline]
unsafe fn decode_half(
    slots: *const i32,
    x: &mut [__m256i; 4],
    bytes: *const u8,
    at: &mut usize,
) -> __m256i {
    let low_bits = _mm256_set1_epi32(TOTAL as i32 - 1);
    let byte = _mm256_set1_epi32(0xff);
    let low = _mm256_set1_epi32(LOW as i32);
    let mut symbols = [_mm256_setzero_si256(); 4];
    for (x, symbols) in x.iter_mut().zip(&mut symbols) {
        // SAFETY: an index is below TOTAL; a vector takes at most 8 words, and those before it in this half at most 24.
        unsafe {
            let slot = looked_up(slots, _mm256_and_si256(*x, low_bits));
            *symbols = _mm256_and_si256(slot, byte);
            let within = _mm256_and_si256(_mm256_srli_epi32::<8>(slot), low_bits);
            let product = _mm256_mullo_epi32(
                _mm256_srli_epi32::<20>(slot),
                _mm256_srli_epi32::<{ BITS as i32 }>(*x),
            );
            let next = _mm256_add_epi32(product, within);
            // States are below 2³¹, so that a signed comparison does.
            let short = _mm256_cmpgt_epi32(low, next);
            let mask = _mm256_movemask_ps(_mm256_castsi256_ps(short)) as usize;
            let found = _mm_loadu_si128(bytes.add(*at).cast());
            let found = _mm_shuffle_epi8(found, _mm_loadu_si128(SPREAD[mask].as_ptr().cast()));
            let longer =
                _mm256_or_si256(_mm256_slli_epi32::<16>(next), _mm256_cvtepu16_epi32(found));
            *x = _mm256_blendv_epi8(next, longer, short);
            *at += 2 * mask.count_ones() as usize;
        }
    }
    let first = _mm256_packus_epi32(symbols[0], symbols[1]);
    let second = _mm256_packus_epi32(symbols[2], symbols[3]);
    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_permutevar8x32_epi32(_mm256_packus_epi16(first, second), order)
}

/// Eight table entries by scalar loads: faster than a gather instruction where that is microcode.
///
/// # Safety
/// The processor must have AVX2; every index must lie within `slots`.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn looked_up(slots: *const i32, indices: __m256i) -> __m256i {
    let (low, high) = (
        _mm256_castsi256_si128(indices),
        _mm256_extracti128_si256::<1>(indices),
    );
    let pairs = [
        _mm_cvtsi128_si64(low) as u64,
        _mm_extract_epi64::<1>(low) as u64,
        _mm_cvtsi128_si64(high) as u64,
        _mm_extract_epi64::<1>(high) as u64,
    ];
    // SAFETY: as the caller promises.
    let entry = |index: u64| unsafe { *slots.add(index as usize) };
    let (a, b) = (entry(pairs[0] & 0xffff_ffff), entry(pairs[0] >> 32));
    let (c, d) = (entry(pairs[1] & 0xffff_ffff), entry(pairs[1] >> 32));
    let (e, f) = (entry(pairs[2] & 0xffff_ffff), entry(pairs[2] >> 32));
    let (g, h) = (entry(pairs[3] & 0xffff_ffff), entry(pairs[3] >> 32));
    _mm256_setr_epi32(a, b, c, d, e, f, g, h)
}

/// Encode `run`, whole groups, backwards.
///
/// # Safety
/// The processor must have AVX2 and POPCNT, and `words` room for one word a symbol beside its slack.
#[target_feature(enable = "avx2,popcnt")]
pub(super) unsafe fn encode(
    table: &Table,
    run: &[u8],
    states: &mut [u32; LANES],
    words: &mut Words,
) {
    let (groups, rest) = run.as_chunks::<LANES>();
    debug_assert!(rest.is_empty() && words.first >= run.len() + Words::SLACK);
    let steps = table.steps.as_ptr();
    let mut out = words.first;
    // SAFETY: a vector's loads and stores of `states` stay within its 256 bytes; a symbol is an index within the 256
    // steps, which are 16 bytes each. Every lane writes at most one word, for which the caller has made room, and the
    // store of a vector begins at most SLACK words in front of `out`.
    unsafe {
        let front = words.words.as_mut_ptr();
        let mut x = loaded(states);
        let low_half = _mm256_set1_epi32(0xffff);
        let total = _mm256_set1_epi32(TOTAL as i32);
        for group in groups.iter().rev() {
            for v in (0..8).rev() {
                let x = &mut x[v / 4][v % 4];
                let [reciprocal, start, rest] = transposed(steps, &group[8 * v..8 * v + 8]);
                let frequency = _mm256_and_si256(rest, low_half);
                let keep =
                    _mm256_cmpgt_epi32(_mm256_slli_epi32::<{ 31 - BITS as i32 }>(frequency), *x);
                let mask = !_mm256_movemask_ps(_mm256_castsi256_ps(keep)) as usize & 0xff;
                let halves = _mm256_and_si256(*x, low_half);
                let halves = _mm_packus_epi32(
                    _mm256_castsi256_si128(halves),
                    _mm256_extracti128_si256::<1>(halves),
                );
                let halves =
                    _mm_shuffle_epi8(halves, _mm_loadu_si128(GATHER[mask].as_ptr().cast()));
                _mm_storeu_si128(front.add(out - Words::SLACK).cast(), halves);
                out -= mask.count_ones() as usize;
                let kept = _mm256_blendv_epi8(_mm256_srli_epi32::<16>(*x), *x, keep);
                let even = _mm256_srli_epi64::<32>(_mm256_mul_epu32(kept, reciprocal));
                let odd = _mm256_mul_epu32(
                    _mm256_srli_epi64::<32>(kept),
                    _mm256_srli_epi64::<32>(reciprocal),
                );
                let quotient = _mm256_blend_epi32::<0b1010_1010>(even, odd);
                let quotient = _mm256_srlv_epi32(quotient, _mm256_srli_epi32::<16>(rest));
                let more = _mm256_mullo_epi32(quotient, _mm256_sub_epi32(total, frequency));
                *x = _mm256_add_epi32(_mm256_add_epi32(kept, start), more);
            }
        }
        stored(&x, states);
    }
    words.first = out;
}

/// The first three fields of the steps of eight symbols.
///
/// # Safety
/// The processor must have AVX2; `steps` must point to 256 steps and `symbols` have 8 elements.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn transposed(steps: *const Step, symbols: &[u8]) -> [__m256i; 3] {
    // SAFETY: as the caller promises; a step is 16 bytes.
    unsafe {
        let load =
            |i: usize| _mm_load_si128(steps.add(usize::from(*symbols.get_unchecked(i))).cast());
        let pair =
            |i: usize| _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(load(i)), load(i + 4));
        let (a, b, c, d) = (pair(0), pair(1), pair(2), pair(3));
        let (ab, cd) = (_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d));
        let (ab_rest, cd_rest) = (_mm256_unpackhi_epi32(a, b), _mm256_unpackhi_epi32(c, d));
        [
            _mm256_unpacklo_epi64(ab, cd),
            _mm256_unpackhi_epi64(ab, cd),
            _mm256_unpacklo_epi64(ab_rest, cd_rest),
        ]
    }
}
