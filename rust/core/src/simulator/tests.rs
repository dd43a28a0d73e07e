//! Small traces by hand, and the optimum as a bound on every policy.

use proptest::prelude::*;

use super::*;

/// Requests of chains, each a list of chunks; parents follow from the first chain that has a chunk.
fn trace(requests: &[&[&[u32]]], tokens: &[u32]) -> Trace {
    let mut trace = Trace {
        starts: vec![0],
        parents: vec![NONE; tokens.len()],
        tokens: tokens.to_vec(),
        ..Trace::default()
    };
    for (time, chains) in requests.iter().enumerate() {
        for chain in *chains {
            let mut position = 0;
            for (at, &block) in chain.iter().enumerate() {
                if at > 0 {
                    trace.parents[block as usize] = chain[at - 1];
                }
                trace.blocks.push(block);
                trace.positions.push(position);
                position += tokens[block as usize];
            }
        }
        trace.times.push(time as u64 * 1_000_000_000);
        trace.starts.push(trace.blocks.len());
    }
    trace.check().expect("well formed");
    trace
}

#[test]
fn a_prompt_hits_what_the_last_one_left() {
    let trace = trace(
        &[&[&[0, 1, 2]], &[&[0, 1, 2]], &[&[0, 1, 3]]],
        &[4, 4, 4, 4],
    );
    for kind in PolicyKind::ALL {
        let all = simulate(&trace, kind, 16, &Cost::default());
        assert_eq!(
            (all.accesses, all.hits, all.hit_tokens, all.evicted),
            (9, 5, 20, 0),
            "{kind}"
        );
        // Two of three fit: the third finds no room, because a prompt's own chunks don't go for it.
        let two = simulate(&trace, kind, 8, &Cost::default());
        assert_eq!((two.hits, two.rejected, two.evicted), (4, 3, 0), "{kind}");
    }
    let best = clairvoyant(&trace, 8, &Cost::default());
    assert_eq!(best.hits, 4);
}

#[test]
fn chains_shrink_from_their_leaves() {
    // A chain of three, then two others: the first chunk of the chain goes last.
    let trace = trace(&[&[&[0, 1, 2]], &[&[3], &[4]], &[&[0, 1, 2]]], &[1; 5]);
    for kind in PolicyKind::ALL {
        let outcome = simulate(&trace, kind, 3, &Cost::default());
        assert_eq!((outcome.hits, outcome.evicted), (1, 4), "{kind}");
    }
}

#[test]
fn saved_time_grows_with_the_position() {
    let cost = Cost {
        attention_tokens: 100.0,
    };
    let trace = trace(&[&[&[0, 1]], &[&[0, 1]]], &[100, 100]);
    let outcome = simulate(&trace, PolicyKind::Lru, 200, &cost);
    // 100 · (1 + 50/100) and 100 · (1 + 150/100).
    assert_eq!((outcome.saved, outcome.cost), (400.0, 800.0));
    assert_eq!(cost.per_token(100, 100), 2.5);
}

/// What lies below costs its load, or is computed where that is faster; a chain goes on from one place to the other.
#[test]
fn what_lies_below_is_loaded() {
    let cost = Cost {
        attention_tokens: 100.0,
    };
    // Two chunks, then others that push the second out of memory, then the two again.
    let trace = trace(&[&[&[0, 1]], &[&[2]], &[&[0, 1]]], &[100; 3]);
    for kind in PolicyKind::ALL {
        for told in [false, true] {
            let lower = |share, load| Lower { share, load, told };
            let run = |lower| simulate_above(&trace, kind, 200, &cost, &lower);
            let nothing = run(lower(0.0, 0.0));
            assert_eq!((nothing.hits, nothing.loads, nothing.saved), (1, 0, 150.0));
            let all = run(lower(1.0, 0.5));
            // The second takes 250 to compute and 50 to load.
            assert_eq!((all.hits, all.loads, all.saved), (1, 1, 350.0), "{kind}");
            let slow = run(lower(1.0, 3.0));
            assert_eq!((slow.loads, slow.saved), (1, 150.0), "{kind}");
        }
    }
}

/// With half of the chunks below and loading cheap, memory is for the other half: whoever is told saves more.
#[test]
fn the_default_policy_keeps_what_lies_nowhere_else() {
    // Forty chunks, asked for in turn in an order without meaning; half of them fit.
    let requests: Vec<[u32; 1]> = (0..4000)
        .map(|at| [(fingerprint(at) % 40) as u32])
        .collect();
    let chains: Vec<[&[u32]; 1]> = requests
        .iter()
        .map(|request| [request.as_slice()])
        .collect();
    let requests: Vec<&[&[u32]]> = chains.iter().map(<[_; 1]>::as_slice).collect();
    let trace = trace(&requests, &[256; 40]);
    let run = |told| {
        let lower = Lower {
            share: 0.5,
            load: 0.1,
            told,
        };
        let kind = PolicyKind::Adaptive;
        simulate_above(&trace, kind, 20 * 256, &Cost::default(), &lower)
    };
    let (blind, told) = (run(false), run(true));
    let lost = |outcome: &Outcome| outcome.cost - outcome.saved;
    assert!(
        lost(&told) < 0.6 * lost(&blind),
        "{told:?} against {blind:?}"
    );
}

#[test]
fn malformed_traces_are_refused_by_name() {
    let good = trace(&[&[&[0, 1]]], &[1, 1]);
    let broken: [(&str, Trace); 5] = [
        (
            "starts",
            Trace {
                starts: vec![0],
                ..good.clone()
            },
        ),
        (
            "starts",
            Trace {
                starts: vec![0, 3],
                ..good.clone()
            },
        ),
        (
            "positions",
            Trace {
                positions: vec![0],
                ..good.clone()
            },
        ),
        (
            "tokens",
            Trace {
                tokens: vec![1, 0],
                ..good.clone()
            },
        ),
        (
            "blocks",
            Trace {
                blocks: vec![1, 0],
                ..good.clone()
            },
        ),
    ];
    for (name, trace) in broken {
        let error = trace.check().expect_err(name).to_string();
        assert!(error.starts_with(name), "{error}");
    }
}

/// Zipf 1.0 over 10,000 keys, a million accesses, against what foyer publishes for its own implementations
/// (`foyer-memory/benches/bench_hit_ratio.rs`, 5 million accesses; S3-FIFO with a ghost queue as long as the cache).
#[test]
fn zipf_hit_ratios_are_those_published() {
    const KEYS: usize = 10_000;
    let mut sums: Vec<f64> = (1..=KEYS)
        .scan(0.0, |sum, rank| {
            *sum += 1.0 / rank as f64;
            Some(*sum)
        })
        .collect();
    let total = sums[KEYS - 1];
    sums.iter_mut().for_each(|sum| *sum /= total);
    let mut trace = Trace {
        parents: vec![NONE; KEYS],
        tokens: vec![1; KEYS],
        ..Trace::default()
    };
    for at in 0..1_000_000_u32 {
        let draw = (super::fingerprint(at) >> 11) as f64 / (1_u64 << 53) as f64;
        trace
            .blocks
            .push(sums.partition_point(|&sum| sum < draw).min(KEYS - 1) as u32);
        trace.positions.push(0);
        trace.times.push(u64::from(at) * 1_000_000);
    }
    trace.starts = (0..=trace.blocks.len()).collect();
    let published = [
        (PolicyKind::Fifo, 100, 34.4),
        (PolicyKind::Lru, 100, 39.1),
        (PolicyKind::S3Fifo, 100, 50.6),
        (PolicyKind::Fifo, 1000, 63.2),
        (PolicyKind::Lru, 1000, 67.6),
        (PolicyKind::S3Fifo, 1000, 73.8),
    ];
    for (kind, capacity, percent) in published {
        let outcome = simulate(&trace, kind, capacity, &Cost::default());
        let found = 100.0 * outcome.hits as f64 / outcome.accesses as f64;
        assert!(
            (found - percent).abs() <= 0.5,
            "{kind} at {capacity}: {found:.2} against {percent}"
        );
    }
    for (capacity, least) in [(100, 48.0), (1000, 73.0)] {
        let outcome = simulate(&trace, PolicyKind::Adaptive, capacity, &Cost::default());
        let found = 100.0 * outcome.hits as f64 / outcome.accesses as f64;
        assert!(found >= least, "adaptive at {capacity}: {found:.2}");
    }
}

fn requests() -> impl Strategy<Value = Vec<Vec<u8>>> {
    // Paths from the root of a binary tree of depth 5: chains that share prefixes.
    prop::collection::vec(prop::collection::vec(0..2_u8, 1..6), 1..80)
}

proptest! {
    /// Nobody finds more chunks of one size than the optimum, and nobody anything beyond capacity.
    #[test]
    fn no_policy_beats_the_optimum(paths in requests(), capacity in 1..20_u64) {
        let chains: Vec<Vec<u32>> = paths
            .iter()
            .map(|path| path.iter().scan(0, |node, &bit| { *node = *node * 2 + 1 + u32::from(bit); Some(*node) }).collect())
            .collect();
        let requests: Vec<Vec<&[u32]>> = chains.iter().map(|chain| vec![chain.as_slice()]).collect();
        let requests: Vec<&[&[u32]]> = requests.iter().map(Vec::as_slice).collect();
        let trace = trace(&requests, &[1; 64]);
        let best = clairvoyant(&trace, capacity, &Cost::default());
        let endless = clairvoyant(&trace, 64, &Cost::default());
        prop_assert!(best.hits <= endless.hits);
        for kind in PolicyKind::ALL {
            let outcome = simulate(&trace, kind, capacity, &Cost::default());
            prop_assert!(outcome.hits <= best.hits, "{} found {} of {}", kind, outcome.hits, best.hits);
            prop_assert_eq!(simulate(&trace, kind, 64, &Cost::default()).hits, endless.hits);
            let stored = outcome.accesses - outcome.hits - outcome.rejected;
            prop_assert!(stored >= outcome.evicted && stored - outcome.evicted <= capacity);
        }
    }
}
