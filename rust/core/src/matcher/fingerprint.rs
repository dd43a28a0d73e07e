//! Rolling fingerprints of token windows, keyed by the namespace.
//!
//! `f(t) = Σ (tᵢ + 1)·bⁿ⁻¹⁻ⁱ mod 2⁶¹ − 1` with a secret base `b`: two different windows of n tokens collide for at most
//! n − 1 of the 2⁶¹ bases, and whoever can't see the namespace's digest can't know which. The result is mixed with a
//! second secret, so its bits can be used directly as hash bits.

const PRIME: u64 = (1 << 61) - 1;
const CONTEXT: &str = "blendstore 2026 matcher fingerprint v1";

/// The fingerprint function of one namespace for windows of one length.
pub(super) struct Fingerprint {
    window: usize,
    base: u64,
    /// `base` to the power of `window`: weight of the token that leaves.
    leaving: u64,
    salt: [u64; 2],
}

impl Fingerprint {
    /// `window` is at least 1.
    pub(super) fn new(namespace: &[u8; 32], window: usize) -> Self {
        let secret = blake3::derive_key(CONTEXT, namespace);
        let word =
            |i: usize| u64::from_le_bytes(secret[8 * i..8 * i + 8].try_into().expect("8 bytes"));
        // Bases up to 2³² could be met by a token's value; the others are equally likely but for a bias of 2⁻³².
        let low = 1 << 32;
        let base = low + word(0) % (PRIME - 1 - low);
        let leaving = (0..window).fold(1, |power, _| multiply(power, base));
        Self {
            window,
            base,
            leaving,
            salt: [word(1), word(2) | 1],
        }
    }

    /// Fingerprint of exactly one window.
    pub(super) fn of(&self, tokens: &[u32]) -> u64 {
        self.mix(self.sum(tokens))
    }

    /// Fingerprints of the windows of `tokens`, from any place on.
    pub(super) fn roll<'a>(&'a self, tokens: &'a [u32]) -> Roll<'a> {
        Roll {
            function: self,
            tokens,
            next: usize::MAX,
            sum: 0,
        }
    }

    fn sum(&self, tokens: &[u32]) -> u64 {
        tokens.iter().fold(0, |sum, &token| {
            add(multiply(sum, self.base), u64::from(token) + 1)
        })
    }

    fn mix(&self, sum: u64) -> u64 {
        let product = u128::from(sum ^ self.salt[0]) * u128::from(self.salt[1]);
        (product as u64) ^ ((product >> 64) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

/// A window that moves over tokens; a step to the next place costs O(1), a jump O(window).
pub(super) struct Roll<'a> {
    function: &'a Fingerprint,
    tokens: &'a [u32],
    /// The place that is one step away.
    next: usize,
    sum: u64,
}

impl Roll<'_> {
    /// Fingerprint of the window that starts at `start`, or `None` when it doesn't fit.
    #[inline]
    pub(super) fn at(&mut self, start: usize) -> Option<u64> {
        let Fingerprint {
            window,
            base,
            leaving,
            ..
        } = *self.function;
        let entering = *self.tokens.get(start + window - 1)?;
        self.sum = if start == self.next {
            let grown = add(multiply(self.sum, base), u64::from(entering) + 1);
            add(
                grown,
                PRIME - multiply(leaving, u64::from(self.tokens[start - 1]) + 1),
            )
        } else {
            self.function.sum(&self.tokens[start..start + window])
        };
        self.next = start + 1;
        Some(self.function.mix(self.sum))
    }
}

fn multiply(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    reduce((product as u64 & PRIME) + (product >> 61) as u64)
}

fn add(a: u64, b: u64) -> u64 {
    reduce(a + b)
}

/// Of a sum of two values up to 2⁶¹.
fn reduce(sum: u64) -> u64 {
    if sum >= PRIME { sum - PRIME } else { sum }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// A rolled fingerprint is that of the window by itself, after steps and after jumps.
        #[test]
        fn rolling_equals_direct(
            tokens in prop::collection::vec(prop_oneof![0_u32..4, any::<u32>()], 0..200),
            window in 1_usize..40,
            starts in prop::collection::vec(0_usize..200, 0..50),
        ) {
            let function = Fingerprint::new(&[7; 32], window);
            let mut roll = function.roll(&tokens);
            for start in (0..=tokens.len()).chain(starts).chain(0..3) {
                let direct = tokens.get(start..start + window).map(|tokens| function.of(tokens));
                prop_assert_eq!(roll.at(start), direct);
            }
        }

        /// The arithmetic agrees with u128.
        #[test]
        fn arithmetic_is_modulo_the_prime(a in 0..PRIME, b in 0..PRIME) {
            prop_assert_eq!(u128::from(multiply(a, b)), u128::from(a) * u128::from(b) % u128::from(PRIME));
            prop_assert_eq!(add(a, b), ((u128::from(a) + u128::from(b)) % u128::from(PRIME)) as u64);
        }
    }

    /// Case s12: sequences made to collide under a known base (31, or any other, ours included if it leaked from another
    /// namespace) do not collide here, because the base differs.
    #[test]
    fn case_s12_sequences_crafted_for_a_known_base_differ() {
        let window = 32;
        let plain: Vec<u32> = (100..132).collect();
        let target = Fingerprint::new(&[1; 32], window);

        let mut crafted = plain.clone();
        crafted[9] += 1;
        crafted[10] -= 31;
        let base_31 = |tokens: &[u32]| {
            tokens
                .iter()
                .fold(0_u64, |sum, &t| sum.wrapping_mul(31).wrapping_add(t.into()))
        };
        assert_eq!(
            base_31(&plain),
            base_31(&crafted),
            "the attack is real for base 31"
        );
        assert_ne!(target.of(&plain), target.of(&crafted));

        let known = Fingerprint::new(&[2; 32], window);
        let (plain, crafted) = collision(&known);
        assert_ne!(plain, crafted);
        assert_eq!(
            known.of(&plain),
            known.of(&crafted),
            "the attack is real for a base that is known"
        );
        assert_ne!(target.of(&plain), target.of(&crafted));
    }

    /// Two windows that collide under a function whose base is known: a short vector of the lattice of relations
    /// between three powers of the base, found by Euclid's algorithm on (PRIME, base) and spread over neighbours.
    pub(in crate::matcher) fn collision(known: &Fingerprint) -> (Vec<u32>, Vec<u32>) {
        // r = s·base mod PRIME with r and s near 2³⁰·⁵, so r·b⁰ − s·b¹ = 0: both fit in a token.
        let (mut remainders, mut factors) = (
            (i128::from(PRIME), i128::from(known.base)),
            (0_i128, 1_i128),
        );
        while remainders.1 >= 1 << 31 {
            let quotient = remainders.0 / remainders.1;
            remainders = (remainders.1, remainders.0 - quotient * remainders.1);
            factors = (factors.1, factors.0 - quotient * factors.1);
        }
        let (r, s) = (remainders.1, factors.1);
        assert!(
            s.unsigned_abs() < 1 << 31,
            "the first remainder below 2³¹ has a factor of at most 2³⁰"
        );
        let plain = vec![1_u32 << 31; known.window];
        let mut crafted = plain.clone();
        let shift = |token: u32, by: i128| u32::try_from(i128::from(token) + by).expect("in range");
        crafted[5] = shift(crafted[5], s);
        crafted[6] = shift(crafted[6], -r);
        (plain, crafted)
    }
}
