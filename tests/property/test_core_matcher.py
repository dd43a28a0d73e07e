"""The matcher through Python: documents anywhere in a prompt, against brute force and against the tokens themselves."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from blendstore import Store
from tests.records import Tokens, concatenate, keys_of, put, tenant

NS = tenant()
CHUNK_SIZE = 64
# A run of one chunk's tokens that long holds an anchor: its first row's window, or the next one 128 rows on.
CERTAIN = CHUNK_SIZE


def tokens(seed: int, ntokens: int, letters: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, letters, ntokens, dtype=np.uint32)


pieces = st.tuples(st.integers(0, 5), st.integers(0, 400), st.integers(0, 400))


@settings(max_examples=150, deadline=None)
@given(
    letters=st.sampled_from([2, 5, 50, 100_000]),
    lengths=st.lists(st.integers(0, 400), min_size=1, max_size=5),
    layout=st.lists(pieces, max_size=6),
    min_tokens=st.integers(0, 100),
)
def test_matches_are_true_and_whole_documents_are_found(
    letters: int, lengths: list[int], layout: list[tuple[int, int, int]], min_tokens: int
) -> None:
    """Every match equals its record's tokens, none overlap, and no whole chunk in the prompt is missed."""
    store = Store(capacity_bytes=1 << 22, chunk_size=CHUNK_SIZE)
    library = [tokens(seed, ntokens, letters) for seed, ntokens in enumerate(lengths)]
    records: dict[bytes, Tokens] = {}
    for document in library:
        put(store, NS, document)
        keys = keys_of(NS.chain_keys(document, chunk_size=CHUNK_SIZE))
        records |= {key: document[i * CHUNK_SIZE : (i + 1) * CHUNK_SIZE] for i, key in enumerate(keys)}
    parts = []
    for which, start, stop in layout:
        source = library[which] if which < len(library) else tokens(1000 + which, 400, letters)
        parts.append(source[min(start, stop) : max(start, stop)])
    prompt = concatenate([*parts, np.empty(0, np.uint32)])

    matches = store.match(NS, prompt, min_tokens=min_tokens)
    end = 0
    covered = np.zeros(len(prompt), dtype=bool)
    for match in matches:
        assert end <= match.start < match.stop
        end = match.stop
        rows = records[match.key][match.row : match.row + match.stop - match.start]
        assert rows.tolist() == prompt[match.start : match.stop].tolist()
        covered[match.start : match.stop] = True
    assert [(match.start, match.key) for match in store.match(NS, prompt, min_tokens=min_tokens)] == [
        (match.start, match.key) for match in matches
    ]

    if letters > 2 and min_tokens <= 1:
        for record in records.values():
            for start in range(len(prompt) - CERTAIN + 1 if len(record) == CERTAIN else 0):
                if prompt[start : start + CERTAIN].tolist() == record.tolist():
                    uncovered = ~covered[start : start + CERTAIN]
                    assert not uncovered.all(), f"a whole chunk at {start} was not found"


@settings(max_examples=60, deadline=None)
@given(
    offset=st.integers(0, 700),
    ntokens=st.integers(CHUNK_SIZE, 700),
    lead=st.integers(0, 200),
    after=st.integers(0, 200),
)
def test_a_document_is_covered_whatever_it_was_stored_in(offset: int, ntokens: int, lead: int, after: int) -> None:
    """Chunk boundaries of the stored chain need not be the document's: it is found from its first to its last token."""
    store = Store(capacity_bytes=1 << 22, chunk_size=CHUNK_SIZE)
    document = tokens(1, ntokens, 100_000)
    put(store, NS, concatenate([tokens(2, lead, 100_000), document, tokens(3, after, 100_000)]))
    prompt = concatenate([tokens(4, offset, 100_000), document, tokens(5, 30, 100_000)])
    covered = np.zeros(len(prompt), dtype=bool)
    for match in store.match(NS, prompt):
        covered[match.start : match.stop] = True
    # A document shorter than a chunk and a window may lie so that it holds no anchor.
    if ntokens >= CHUNK_SIZE + 31:
        assert covered[offset : offset + ntokens].all()
        # Random neighbours may agree by chance with one token or two.
        assert int(covered.sum()) <= ntokens + 4
