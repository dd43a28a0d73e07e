use std::collections::HashSet;

use proptest::prelude::*;

use super::*;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn plain() -> Namespace {
    Namespace::new(
        &[("model", b"weights".as_slice()), ("dtype", b"bfloat16")],
        b"salt",
    )
}

/// Case s09: keys are the same on every machine, in every process and in every version: these were written down once.
#[test]
fn case_s09_golden_vectors() {
    let ns = plain();
    let tokens: Vec<u32> = (0..300).collect();
    let keys = ns.chain_keys(&tokens, 256, &SEGMENT_ROOT);
    let head = ns.chain_keys(&tokens, 256, &HEAD_ROOT);
    let contexts = ns.context_digests(&tokens, &[0, 1, 300]).expect("sorted");
    let seen = [
        ns.digest(),
        &ns.content_id(&tokens),
        &keys[0],
        &keys[1],
        &head[1],
        &contexts[0],
        &contexts[2],
    ];
    assert_eq!(seen.map(|bytes| hex(bytes)), GOLDEN);
}

const GOLDEN: [&str; 7] = [
    "120332bafcacaf79ad193b252e17d07fcec84cf25a36e63287acc1bcd40dd8f4",
    "ede73322680cff4aa5b3f1e2e5aaea7391a14f5fbadc0dafcb874d4c6e2e3c74",
    "9eeba97e768468fa88f016c89426063e6e1fe587003c294de2ecb5d9f4f4ff29",
    "ca4e7ed6569f4f4d3b0681b5b79751fc26b9a161a3e8606f9b037221ac06448b",
    "e5951150bc53a963ed40bf30a77e070e5e4bf3841c0a492a32e13f66d9c0b692",
    "c2f68ccbcd36c9342dc342ed5cf995f020580067a0d31802b72adca27e328082",
    "6aa50f2469d28c4359cc6076b38dfe9c657f6e4a53ea7ae29966694a20be0402",
];

/// The documented formulas, written with the plain one-shot functions of BLAKE3.
#[test]
fn keys_follow_the_documented_formulas() {
    let ns = plain();
    let tokens: Vec<u32> = (7..700).map(|n| n * 77_777).collect();
    let bytes: Vec<u8> = tokens
        .iter()
        .flat_map(|token| token.to_le_bytes())
        .collect();
    assert_eq!(
        ns.content_id(&tokens),
        *blake3::keyed_hash(ns.digest(), &bytes).as_bytes()
    );
    let chain_key = blake3::derive_key("blendstore 2026 chain key v1", ns.digest());
    let mut parent = HEAD_ROOT;
    for (key, chunk) in ns
        .chain_keys(&tokens, 256, &HEAD_ROOT)
        .iter()
        .zip(tokens.chunks(256))
    {
        let linked = [parent, ns.content_id(chunk)].concat();
        assert_eq!(*key, *blake3::keyed_hash(&chain_key, &linked).as_bytes());
        parent = *key;
    }
    let context_key = blake3::derive_key("blendstore 2026 context key v1", ns.digest());
    for position in [0, 1, 255, 256, 257, 693] {
        let whole = blake3::keyed_hash(&context_key, &bytes[..4 * position]);
        assert_eq!(
            ns.context_digests(&tokens, &[position]),
            Ok(vec![*whole.as_bytes()])
        );
    }
}

/// Case s10: neither fields nor salt can be cut differently to give the same namespace.
#[test]
fn case_s10_framing_is_injective() {
    let long = "n".repeat(300);
    let spaces = [
        Namespace::new(&[("ab", b"c".as_slice())], b""),
        Namespace::new(&[("a", b"bc".as_slice())], b""),
        Namespace::new(&[("a", b"b".as_slice()), ("c", b"")], b""),
        Namespace::new(&[("a", b"".as_slice()), ("b", b"c")], b""),
        Namespace::new(&[("", b"abc".as_slice())], b""),
        Namespace::new(&[("abc", b"".as_slice())], b""),
        Namespace::new(&[("b", b"c".as_slice())], b"a"),
        Namespace::new::<&str, &[u8]>(&[], b"abc"),
        Namespace::new::<&str, &[u8]>(&[], b""),
        Namespace::new(&[("lora", b"tenant-b".as_slice())], b""),
        Namespace::new::<&str, &[u8]>(&[], b"tenant-b"),
        Namespace::new(&[("model", "org/name @ 50 % ü".as_bytes())], b""),
        Namespace::new(&[("model", long.as_bytes())], b""),
        Namespace::new(&[(&long, b"model".as_slice())], b""),
    ];
    let digests: HashSet<_> = spaces.iter().map(|ns| *ns.digest()).collect();
    assert_eq!(digests.len(), spaces.len());
}

/// Case s13: the same tokens have no key in common for two tenants, nor for two models of one.
#[test]
fn case_s13_tenants_share_no_key() {
    let tokens: Vec<u32> = (0..1000).collect();
    let fields = [("model", b"weights".as_slice())];
    let spaces = [
        Namespace::new(&fields, b"tenant a"),
        Namespace::new(&fields, b"tenant b"),
        Namespace::new(&[("model", b"other weights".as_slice())], b"tenant a"),
    ];
    let mut keys = HashSet::new();
    let mut count = 0;
    for ns in &spaces {
        let mut add = |key: Key| {
            keys.insert(key);
            count += 1;
        };
        ns.chain_keys(&tokens, 100, &SEGMENT_ROOT)
            .into_iter()
            .for_each(&mut add);
        ns.chain_keys(&tokens, 100, &HEAD_ROOT)
            .into_iter()
            .for_each(&mut add);
        ns.context_digests(&tokens, &[0, 500])
            .expect("sorted")
            .into_iter()
            .for_each(&mut add);
        add(ns.content_id(&tokens));
    }
    assert_eq!(keys.len(), count);
}

/// Case s12's idea for keys: sequences made to collide under a polynomial hash of a known base have different ids.
#[test]
fn case_s12_crafted_sequences_have_other_keys() {
    let ns = plain();
    let tokens: Vec<u32> = (100..356).collect();
    for base in [31, 257, 65_599] {
        let mut crafted = tokens.clone();
        crafted[10] += 1;
        crafted[11] = crafted[11].wrapping_sub(base);
        assert_ne!(ns.content_id(&crafted), ns.content_id(&tokens));
    }
}

/// Bounds that don't lie in the tokens, and positions that go back, are errors that name the value.
#[test]
fn wrong_ranges_are_named() {
    let ns = plain();
    let error = ns
        .segment_keys(&[1, 2, 3], &[(0, 2), (1, 4)], 2, false)
        .expect_err("4 is behind the end");
    assert!(error.to_string().contains("(1, 4)"), "{error}");
    assert!(ns.segment_keys(&[1, 2, 3], &[(2, 1)], 2, false).is_err());
    let error = ns
        .context_digests(&[1, 2, 3], &[2, 1])
        .expect_err("not sorted");
    assert!(error.to_string().contains("positions = 1"), "{error}");
    assert!(ns.context_digests(&[1, 2, 3], &[4]).is_err());
}

/// Only a segment that starts at 0 begins a head chain, and only when asked for.
#[test]
fn head_picks_the_root_of_the_first_segment() {
    let ns = plain();
    let tokens: Vec<u32> = (0..20).collect();
    let keys = ns
        .segment_keys(&tokens, &[(0, 10), (10, 20)], 16, true)
        .expect("valid");
    assert_eq!(keys[0], ns.chain_keys(&tokens[..10], 16, &HEAD_ROOT)[0]);
    assert_eq!(keys[1], ns.chain_keys(&tokens[10..], 16, &SEGMENT_ROOT)[0]);
    let keys = ns
        .segment_keys(&tokens, &[(0, 10)], 16, false)
        .expect("valid");
    assert_eq!(keys[0], ns.chain_keys(&tokens[..10], 16, &SEGMENT_ROOT)[0]);
}

/// The digest keys the hashes, so it doesn't show in logs.
#[test]
fn debug_hides_the_digest() {
    let ns = plain();
    assert!(!format!("{ns:?}").contains(&hex(&ns.digest()[..8])));
}

proptest! {
    /// Many segments of any length at once, through SIMD lanes, have the keys of each one hashed alone and plainly.
    #[test]
    fn lanes_equal_plain_hashes(
        tokens in prop::collection::vec(any::<u32>(), 0..3000),
        cuts in prop::collection::vec(0.0..1.0f64, 0..24),
        chunk_size in prop_oneof![Just(256usize), Just(16), Just(512), 1..300usize],
    ) {
        let ns = plain();
        let mut ends: Vec<usize> = cuts.iter().map(|cut| (cut * tokens.len() as f64) as usize).collect();
        ends.extend([0, tokens.len()]);
        ends.sort_unstable();
        let bounds: Vec<_> = ends.windows(2).map(|pair| (pair[0], pair[1])).collect();
        let mut plainly = Vec::new();
        for &(start, stop) in &bounds {
            let mut parent = SEGMENT_ROOT;
            for chunk in tokens[start..stop].chunks(chunk_size) {
                parent = ns.chain_key(&parent, &ns.content_id(chunk));
                plainly.push(parent);
            }
        }
        prop_assert_eq!(ns.segment_keys(&tokens, &bounds, chunk_size, false), Ok(plainly));
    }

    /// Any difference in the lists of fields or in the salt gives another namespace.
    #[test]
    fn namespaces_are_equal_only_for_equal_fields(
        a in prop::collection::vec(("[ab]{0,2}", prop::collection::vec(0..2u8, 0..3)), 0..3),
        b in prop::collection::vec(("[ab]{0,2}", prop::collection::vec(0..2u8, 0..3)), 0..3),
        salts in ("[ab]{0,2}", "[ab]{0,2}"),
    ) {
        let same = (&a, &salts.0) == (&b, &salts.1);
        let (a, b) = (Namespace::new(&a, salts.0.as_bytes()), Namespace::new(&b, salts.1.as_bytes()));
        prop_assert_eq!(a == b, same);
    }
}
