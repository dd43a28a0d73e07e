//! The matcher against brute force, on a library of chunks in place of the store.

use proptest::prelude::*;

use super::*;
use crate::key::{Key, SEGMENT_ROOT};

/// Chunks by slot; each is of generation 5.
struct Library {
    chunk_size: usize,
    matcher: Matcher,
    shelf: Vec<Shelved>,
}

struct Shelved {
    ns: Namespace,
    key: Key,
    tokens: Vec<u32>,
    parent: Option<u32>,
    gone: bool,
}

const GENERATION: u32 = 5;

impl Library {
    fn new(chunk_size: usize) -> Self {
        Self {
            chunk_size,
            matcher: Matcher::new(4096, chunk_size).expect("memory"),
            shelf: Vec::new(),
        }
    }

    /// Adds a document as a chain, each chunk once.
    fn add(&mut self, ns: &Namespace, document: &[u32]) {
        let mut parent = None;
        let keys = ns.chain_keys(document, self.chunk_size, &SEGMENT_ROOT);
        for (key, tokens) in keys.into_iter().zip(document.chunks(self.chunk_size)) {
            let known = self.shelf.iter().position(|chunk| chunk.key == key);
            let slot = known.unwrap_or_else(|| {
                let slot = self.shelf.len();
                self.matcher.insert(ns.digest(), slot as u32, tokens);
                self.shelf.push(Shelved {
                    ns: *ns,
                    key,
                    tokens: tokens.to_vec(),
                    parent,
                    gone: false,
                });
                slot
            });
            parent = Some(slot as u32);
        }
    }

    fn remove(&mut self, slot: u32) {
        let chunk = &mut self.shelf[slot as usize];
        chunk.gone = true;
        self.matcher.remove(chunk.ns.digest(), slot, &chunk.tokens);
    }

    fn find(&self, ns: &Namespace, prompt: &[u32], min_tokens: usize) -> Vec<Match> {
        let matches = self.matcher.find(ns, prompt, min_tokens, self);
        self.assert_sound(ns, prompt, &matches);
        matches
    }

    /// Every match is true, of the namespace, and they are in order without overlap.
    fn assert_sound(&self, ns: &Namespace, prompt: &[u32], matches: &[Match]) {
        for found in matches {
            assert!(found.start < found.stop, "empty match {found:?}");
            let chunk = self
                .shelf
                .iter()
                .find(|chunk| chunk.key == found.key)
                .expect("a known key");
            assert_eq!(chunk.ns, *ns);
            assert_eq!(
                chunk.tokens[found.row..found.row + found.stop - found.start],
                prompt[found.start..found.stop],
                "{found:?} claims tokens that differ",
            );
        }
        assert!(
            matches.windows(2).all(|pair| pair[0].stop <= pair[1].start),
            "order or overlap: {matches:?}"
        );
    }
}

struct Pinned<'a> {
    library: &'a Library,
    slot: u32,
}

impl Pinned<'_> {
    fn shelved(&self) -> &Shelved {
        &self.library.shelf[self.slot as usize]
    }
}

impl Known for Pinned<'_> {
    fn namespace(&self) -> &[u8; 32] {
        self.shelved().ns.digest()
    }

    fn key(&self) -> Key {
        self.shelved().key
    }

    fn tokens(&self) -> &[u32] {
        &self.shelved().tokens
    }

    fn parent(&self) -> Option<(u32, u32)> {
        self.shelved().parent.map(|slot| (slot, GENERATION))
    }

    fn children(&self) -> Vec<(u32, u32)> {
        let shelf = self.library.shelf.iter().enumerate().rev();
        shelf
            .filter(|(_, chunk)| chunk.parent == Some(self.slot))
            .map(|(slot, _)| (slot as u32, GENERATION))
            .take(64)
            .collect()
    }
}

impl Resolver for Library {
    type Pinned<'a> = Pinned<'a>;

    fn resident(&self, slot: u32) -> Option<u32> {
        (!self.shelf[slot as usize].gone).then_some(GENERATION)
    }

    fn pin(&self, slot: u32, generation: u32) -> Option<Pinned<'_>> {
        let there = self.resident(slot) == Some(generation);
        there.then_some(Pinned {
            library: self,
            slot,
        })
    }
}

fn tenant(salt: &str) -> Namespace {
    Namespace::new(&[("model", "m")], salt.as_bytes())
}

/// Tokens without repetition: `seed` picks the text.
fn text(seed: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| (seed << 20) + i * 7).collect()
}

fn covered(matches: &[Match], len: usize) -> Vec<bool> {
    let mut covered = vec![false; len];
    for found in matches {
        covered[found.start..found.stop].fill(true);
    }
    covered
}

/// Prompt positions that lie in a run of `certain` tokens of one chunk, by comparing everything with everything.
fn brute_force(library: &Library, ns: &Namespace, prompt: &[u32], certain: usize) -> Vec<bool> {
    let mut expected = vec![false; prompt.len()];
    for chunk in library.shelf.iter().filter(|chunk| chunk.ns == *ns) {
        let len = chunk.tokens.len() as isize;
        for origin in -len..prompt.len() as isize {
            let mut run = 0;
            for row in 0..=len {
                let position = origin + row;
                let equal = row < len
                    && usize::try_from(position)
                        .is_ok_and(|p| prompt.get(p) == Some(&chunk.tokens[row as usize]));
                if equal {
                    run += 1;
                    continue;
                }
                if run >= certain {
                    expected[position as usize - run..position as usize].fill(true);
                }
                run = 0;
            }
        }
    }
    expected
}

/// What the matcher says it finds, it finds: each maximal stretch of uncovered positions that brute force covers is
/// shorter than `certain`.
fn assert_complete(library: &Library, ns: &Namespace, prompt: &[u32], matches: &[Match]) {
    let certain = library.matcher.certain();
    let covered = covered(matches, prompt.len());
    let expected = brute_force(library, ns, prompt, certain);
    let mut missed = 0;
    for position in 0..prompt.len() {
        missed = if expected[position] && !covered[position] {
            missed + 1
        } else {
            0
        };
        assert!(
            missed < certain,
            "positions {}..={position} are known but not found",
            position + 1 - missed
        );
    }
}

#[test]
fn a_document_is_found_whole_at_any_offset_to_its_tail() {
    let ns = tenant("a");
    let mut library = Library::new(256);
    for (seed, len) in [(1, 300), (2, 517), (3, 255), (4, 1031)] {
        library.add(&ns, &text(seed, len));
    }
    for offset in [0, 1, 15, 16, 255, 256, 300, 777] {
        for (seed, len) in [(1, 300), (2, 517), (3, 255), (4, 1031)] {
            let document = text(seed, len);
            let mut prompt = text(90, offset);
            prompt.extend(&document);
            prompt.extend(text(91, 40));
            let keys = ns.chain_keys(&document, 256, &SEGMENT_ROOT);
            let expected: Vec<Match> = keys
                .iter()
                .enumerate()
                .map(|(i, &key)| Match {
                    key,
                    start: offset + 256 * i,
                    stop: offset + len.min(256 * (i + 1)),
                    row: 0,
                })
                .collect();
            assert_eq!(
                library.find(&ns, &prompt, 32),
                expected,
                "document of {len} at {offset}"
            );
        }
    }
}

/// A document cached as a part of something longer has chunk boundaries that are not its own; it is found all the same.
#[test]
fn a_document_inside_a_longer_chain_is_found_whole() {
    let ns = tenant("a");
    let mut library = Library::new(256);
    let document = text(5, 700);
    for lead in [1, 100, 255, 256, 300] {
        let mut longer = text(10 + lead, lead as usize);
        longer.extend(&document);
        longer.extend(text(20, 90));
        let mut fresh = Library::new(256);
        fresh.add(&ns, &longer);
        library.add(&ns, &longer);
        for library in [&fresh, &library] {
            let mut prompt = text(30, 77);
            prompt.extend(&document);
            prompt.extend(text(31, 50));
            let matches = library.find(&ns, &prompt, 32);
            let covered = covered(&matches, prompt.len());
            assert!(
                (0..prompt.len()).all(|p| covered[p] == (77..777).contains(&p)),
                "lead {lead}: {matches:?}"
            );
        }
    }
}

#[test]
fn every_occurrence_is_found_and_a_hole_costs_only_itself() {
    let ns = tenant("a");
    let mut library = Library::new(256);
    let (one, two) = (text(1, 300), text(2, 400));
    library.add(&ns, &one);
    library.add(&ns, &two);
    let prompt = [
        &one[..],
        &text(50, 5),
        &one,
        &two,
        &two,
        &text(51, 100),
        &one,
    ]
    .concat();
    let covered = covered(&library.find(&ns, &prompt, 32), prompt.len());
    let fresh = |p: usize| (300..305).contains(&p) || (1405..1505).contains(&p);
    assert!((0..prompt.len()).all(|p| covered[p] != fresh(p)));

    // One changed token in the middle of a chunk: both sides of it are reused.
    let mut changed = two.clone();
    changed[100] = 1;
    let matches = library.find(&ns, &changed, 32);
    let spans: Vec<_> = matches
        .iter()
        .map(|found| (found.start, found.stop, found.row))
        .collect();
    assert_eq!(spans, [(0, 100, 0), (101, 256, 101), (256, 400, 0)]);
}

#[test]
fn runs_below_the_minimum_are_left_out_and_tails_count_with_their_chain() {
    let ns = tenant("a");
    let mut library = Library::new(256);
    let document = text(1, 263);
    library.add(&ns, &document);
    let prompt = [&text(8, 9)[..], &document[..40], &text(9, 9)].concat();
    assert_eq!(library.find(&ns, &prompt, 41), []);
    assert_eq!(library.find(&ns, &prompt, 40).len(), 1);
    let whole = library.find(&ns, &document, 100);
    assert_eq!(
        whole
            .iter()
            .map(|found| found.stop - found.start)
            .collect::<Vec<_>>(),
        [256, 7]
    );
}

#[test]
fn the_child_that_equals_most_of_the_prompt_continues_a_run() {
    let ns = tenant("a");
    let mut library = Library::new(256);
    let parent = text(1, 256);
    let tails: Vec<Vec<u32>> = (0..5)
        .map(|i| [&text(2, 3 * i)[..], &text(3 + i as u32, 9)].concat())
        .collect();
    for tail in &tails {
        library.add(&ns, &[&parent[..], tail].concat());
    }
    for tail in &tails {
        let prompt = [&parent[..], tail, &text(40, 20)].concat();
        let matches = library.find(&ns, &prompt, 32);
        assert_eq!(
            matches.last().map(|found| found.stop),
            Some(256 + tail.len())
        );
    }
}

#[test]
fn the_longest_run_wins_an_overlap_and_the_rest_is_kept() {
    let ns = tenant("a");
    let mut library = Library::new(256);
    let whole = text(1, 400);
    library.add(&ns, &[&text(2, 50)[..], &whole[..150]].concat());
    library.add(&ns, &whole[60..]);
    let prompt = [&text(2, 50)[..], &whole].concat();
    let matches = library.find(&ns, &prompt, 32);
    let spans: Vec<_> = matches
        .iter()
        .map(|found| (found.start, found.stop, found.row))
        .collect();
    // The second document covers 110..450 (340 tokens), so the first keeps 0..110 of its 200.
    assert_eq!(spans, [(0, 110, 0), (110, 366, 0), (366, 450, 0)]);
    assert_eq!(
        matches,
        library.find(&ns, &prompt, 32),
        "the same prompt gives the same matches"
    );
}

#[test]
fn case_s13_another_tenant_never_matches() {
    let (ours, theirs) = (tenant("ours"), tenant("theirs"));
    let mut library = Library::new(256);
    let document = text(1, 600);
    library.add(&theirs, &document);
    assert_eq!(library.find(&ours, &document, 1), []);
    library.add(&ours, &document);
    let keys: Vec<Key> = library
        .find(&ours, &document, 1)
        .iter()
        .map(|found| found.key)
        .collect();
    assert_eq!(keys, ours.chain_keys(&document, 256, &SEGMENT_ROOT));
}

/// Even if every fingerprint of two namespaces were equal, the chunk's namespace decides.
#[test]
fn case_s13_a_candidate_of_another_tenant_is_refused_by_its_namespace() {
    let (ours, theirs) = (tenant("ours"), tenant("theirs"));
    let mut library = Library::new(256);
    let document = text(1, 256);
    library.matcher.insert(ours.digest(), 0, &document);
    let key = theirs.chain_keys(&document, 256, &SEGMENT_ROOT)[0];
    library.shelf.push(Shelved {
        ns: theirs,
        key,
        tokens: document.clone(),
        parent: None,
        gone: false,
    });
    assert_eq!(library.find(&ours, &document, 1), []);
}

/// Case s12: windows that collide under base 31 or under another namespace's base never match as equal.
#[test]
fn case_s12_crafted_collisions_do_not_match() {
    let ns = tenant("a");
    let other = Fingerprint::new(tenant("b").digest(), WINDOW);
    let (plain, crafted) = fingerprint::tests::collision(&other);
    let mut library = Library::new(256);
    library.add(&ns, &plain);
    assert_eq!(library.find(&ns, &crafted, 1), []);
    assert_eq!(library.find(&ns, &plain, 1).len(), 1);

    // Even under this namespace's own base, if it leaked: the tokens decide.
    let own = Fingerprint::new(ns.digest(), WINDOW);
    let (plain, crafted) = fingerprint::tests::collision(&own);
    library.add(&ns, &plain);
    assert_eq!(own.of(&plain), own.of(&crafted));
    assert_eq!(library.find(&ns, &crafted, 1), []);
    assert_eq!(library.find(&ns, &plain, 1).len(), 1);
}

#[test]
fn removed_chunks_are_not_found() {
    let ns = tenant("a");
    let mut library = Library::new(256);
    let document = text(1, 700);
    library.add(&ns, &document);
    library.remove(2);
    let stops: Vec<usize> = library
        .find(&ns, &document, 1)
        .iter()
        .map(|found| found.stop)
        .collect();
    assert_eq!(
        stops,
        [256, 512],
        "the tail is gone, though its parent still names it"
    );
    library.remove(0);
    let starts: Vec<usize> = library
        .find(&ns, &document, 1)
        .iter()
        .map(|found| found.start)
        .collect();
    assert_eq!(starts, [256]);
    library.remove(1);
    assert_eq!(library.find(&ns, &document, 1), []);
}

/// Boilerplate: thousands of chunks that begin alike, and prompts of nothing else, cost a bounded number of comparisons.
#[test]
fn work_is_bounded_for_repeated_tokens() {
    let ns = tenant("a");
    let mut library = Library::new(256);
    for i in 0..600 {
        let mut document = vec![7; 256];
        document[40 + i % 200] = 1000 + i as u32;
        library.add(&ns, &document);
    }
    library.add(&ns, &vec![7; 2000]);
    for prompt in [
        vec![7; 50_000],
        [vec![7; 239], vec![8]].concat().repeat(200),
    ] {
        let function = Fingerprint::new(ns.digest(), WINDOW);
        let mut roll = function.roll(&prompt);
        let mut search = Search {
            matcher: &library.matcher,
            ns: &ns,
            tokens: &prompt,
            chunks: &library,
            spent: 0,
            verified: HashMap::new(),
        };
        let runs = library.matcher.runs(&mut roll, &mut search);
        let most = FIRST_CREDIT + CREDIT * prompt.len() + 64 * prompt.len();
        assert!(
            search.spent <= most,
            "{} comparisons for {} tokens",
            search.spent,
            prompt.len()
        );
        let matches = resolve(runs, 32);
        library.assert_sound(&ns, &prompt, &matches);
    }
    // The repeated document itself is found from end to end.
    let matches = library.find(&ns, &vec![7; 2000], 1);
    assert!(covered(&matches, 2000).iter().all(|&covered| covered));
}

/// A prompt, made of pieces of documents and of noise, in an alphabet so small that much repeats.
fn corpus() -> impl Strategy<Value = (usize, Vec<Vec<u32>>, Vec<u32>)> {
    let document = (2_u32..40, 0_usize..700)
        .prop_flat_map(|(letters, len)| prop::collection::vec(0..letters, len));
    (
        prop::sample::select(vec![16_usize, 40, 64, 256]),
        prop::collection::vec(document, 1..5),
    )
        .prop_flat_map(|(chunk_size, documents)| {
            let count = documents.len();
            let piece = (
                0..=count,
                0_usize..700,
                0_usize..700,
                prop::collection::vec(0_u32..40, 0..30),
            );
            let shelf = documents.clone();
            prop::collection::vec(piece, 0..6).prop_map(move |pieces| {
                let mut prompt = Vec::new();
                for (which, from, to, noise) in pieces {
                    if let Some(document) = shelf.get(which) {
                        let (from, to) = (from.min(document.len()), to.min(document.len()));
                        prompt.extend(&document[from.min(to)..from.max(to)]);
                    }
                    prompt.extend(noise);
                }
                (chunk_size, documents.clone(), prompt)
            })
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Against brute force: every match is true, and every run long enough to hold an anchor is covered.
    #[test]
    fn finds_what_brute_force_finds((chunk_size, documents, prompt) in corpus()) {
        let ns = tenant("a");
        let mut library = Library::new(chunk_size);
        for document in &documents {
            library.add(&ns, document);
            library.add(&tenant("b"), document);
        }
        for prompt in [prompt.clone(), [prompt, documents.concat()].concat()] {
            let matches = library.find(&ns, &prompt, 1);
            assert_complete(&library, &ns, &prompt, &matches);
        }
    }

    /// Texts of one token and short periods, where everything overlaps everything.
    #[test]
    fn periodic_texts_are_sound(
        period in 1_usize..5,
        lengths in prop::collection::vec(1_usize..900, 1..5),
        prompt in 0_usize..2000,
        min_tokens in 1_usize..300,
    ) {
        let ns = tenant("a");
        let mut library = Library::new(256);
        let periodic = |len: usize| (0..len).map(|i| (i % period) as u32).collect::<Vec<_>>();
        for &len in &lengths {
            library.add(&ns, &periodic(len));
        }
        library.find(&ns, &periodic(prompt), min_tokens);
    }

    #[test]
    fn common_ends_are_those_of_a_plain_loop(
        a in prop::collection::vec(0_u32..2, 0..70),
        b in prop::collection::vec(0_u32..2, 0..70),
        shared in prop::collection::vec(0_u32..2, 0..70),
    ) {
        let prefix = |a: &[u32], b: &[u32]| a.iter().zip(b).take_while(|(a, b)| a == b).count();
        let (mut front_a, mut front_b) = ([&shared[..], &a].concat(), [&shared[..], &b].concat());
        prop_assert_eq!(common_prefix(&front_a, &front_b), prefix(&front_a, &front_b));
        front_a.reverse();
        front_b.reverse();
        let expected = { let (mut a, mut b) = (front_a.clone(), front_b.clone()); a.reverse(); b.reverse(); prefix(&a, &b) };
        prop_assert_eq!(common_suffix(&front_a, &front_b), expected);
    }
}
