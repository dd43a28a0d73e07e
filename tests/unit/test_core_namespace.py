"""Namespaces and keys: golden vectors, framing, errors. A change of any value here orphans every stored record."""

import numpy as np
import pytest

from blendstore import Namespace, StoreError
from tests.records import keys_of, tenant, text

GOLDEN = Namespace([("model", b"weights"), ("layers", b"\x1e")], salt=b"tenant")
TOKENS = np.array([index * 2654435761 % 2**32 for index in range(600)], dtype=np.uint32)


def test_golden_vectors_of_the_key_format() -> None:
    """Computed by another implementation of BLAKE3 from the format in docs/design.md."""
    assert GOLDEN.digest.hex() == "e9b6e2ed93c46404dcc45e9fd6c2a199ce219b38e84cfb4412bb0514d0819a47"
    assert GOLDEN.content_id(TOKENS[:256]).hex() == "455ab7da3eafeb0c7540241b68e8cdd7d29a4ae2bdac03629cb43c90ec665117"
    assert GOLDEN.chain_keys(TOKENS).hex() == (
        "8a36b3628d5f2429a4de20e82f466a236feab711a65d92eff1dd29ec4a49a64a"
        "b58747ce19ffbfeb10418208c20cdcb41c7545402e2bdc44ec8045c4e51c5f30"
        "c6aabac317a90cf585c9e230a03c20f4c1ad76b9fc5cf94e3ab086a7f166bb7c"
    )
    assert GOLDEN.chain_keys(TOKENS, head=True).hex() == (
        "3f599a4fab48d528b86d8af2ca3ff76afc9091d3bc88b53cd36fdf9c0fdcdd3c"
        "95eaed73827cef0198f7e0b856d675bb23113d78bd7fae3643c04d053066ad9e"
        "597ba3bd63c86618e52f56eadf6f7ed3459c97871c10b987552d0ea71ee62fa7"
    )
    assert GOLDEN.context_digests(TOKENS, np.array([0, 1, 300])).hex() == (
        "ed059d54e421c8c5ccbd179a38f40dee2d05b49e0c9aaad057b9dda30e36998b"
        "4791e91b0e1e88644be9bce2eecc65a9cb9704b1142a7077bf14af0868a106ff"
        "5dcc73413e1bc4a212840b0553bee8f7c137aa9de41537e19a03d65ace4cd370"
    )


def test_a_segment_starts_a_new_chain_wherever_it_stands() -> None:
    """The keys of a document do not depend on what stands before it, and only a segment at 0 is a head chain."""
    bounds = np.array([[0, 300], [310, 600]], dtype=np.int64)
    first, second = TOKENS[:300].copy(), TOKENS[310:].copy()
    assert GOLDEN.segment_keys(TOKENS, bounds) == GOLDEN.chain_keys(first) + GOLDEN.chain_keys(second)
    assert GOLDEN.segment_keys(TOKENS, bounds, head=True) == (
        GOLDEN.chain_keys(first, head=True) + GOLDEN.chain_keys(second)
    )
    assert GOLDEN.segment_keys(TOKENS, np.empty((0, 2), dtype=np.int64)) == b""


@pytest.mark.parametrize("chunk_size", [1, 7, 16, 255, 256, 257, 599, 600, 10_000])
def test_a_chain_continues_from_any_of_its_keys(chunk_size: int) -> None:
    """Chunks that follow a known parent have the keys that they have in the whole chain."""
    keys = keys_of(GOLDEN.chain_keys(TOKENS, chunk_size=chunk_size))
    assert len(keys) == -(-600 // chunk_size)
    assert len(set(keys)) == len(keys)
    for index in range(0, len(keys), 50):
        rest = TOKENS[(index + 1) * chunk_size :].copy()
        continued = keys_of(GOLDEN.chain_keys(rest, chunk_size=chunk_size, parent=keys[index]))
        assert continued == keys[index + 1 :]


def test_namespaces_are_values() -> None:
    """Equal fields and salt give equal, interchangeable namespaces; the digest's text does not show a secret."""
    same = Namespace([("model", b"weights"), ("layers", b"\x1e")], salt=b"tenant")
    assert same == GOLDEN
    assert hash(same) == hash(GOLDEN)
    assert {GOLDEN: 1}[same] == 1
    assert tenant("other") != GOLDEN
    assert GOLDEN != "namespace"
    assert GOLDEN.digest.hex() not in repr(GOLDEN)


def test_bytes_like_token_arrays_are_read_in_place() -> None:
    """Any contiguous buffer of uint32 works: numpy arrays, memoryviews, read-only ones."""
    expected = GOLDEN.content_id(TOKENS)
    frozen = TOKENS.copy()
    frozen.flags.writeable = False
    assert GOLDEN.content_id(frozen) == expected
    assert GOLDEN.content_id(TOKENS.data) == expected
    assert GOLDEN.content_id(TOKENS.reshape(20, 30)) == expected
    assert GOLDEN.content_id(memoryview(TOKENS.tobytes()).cast("I")) == expected
    assert GOLDEN.content_id(np.empty(0, dtype=np.uint32)) != expected


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        (np.arange(4, dtype=np.int64), "format 'l'"),
        (np.arange(4, dtype=np.int32), "format 'i'"),
        (np.arange(4, dtype=np.float32), "format 'f'"),
        (np.arange(4, dtype=">u4"), "format '>I'"),
        (np.arange(8, dtype=np.uint32)[::2], "strides"),
        (b"1234", "format 'B'"),
        (np.frombuffer(b"12345", dtype=np.uint8)[1:].view(np.uint32), "misaligned"),
    ],
)
def test_other_token_buffers_are_refused_by_name(tokens: object, told: str) -> None:
    """A wrong dtype is never reinterpreted; the error names the argument, what it got and what it takes."""
    with pytest.raises(StoreError, match=r"tokens = .*uint32") as error:
        GOLDEN.content_id(tokens)  # type: ignore[arg-type]
    assert told in str(error.value)


def test_things_that_are_no_buffers_are_type_errors() -> None:
    with pytest.raises(TypeError, match="tokens: list is not accepted"):
        GOLDEN.content_id([1, 2, 3])  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Namespace([("model", "not bytes")])  # type: ignore[list-item]


def test_wrong_values_are_refused_by_name() -> None:
    with pytest.raises(StoreError, match="chunk_size = 0"):
        GOLDEN.chain_keys(TOKENS, chunk_size=0)
    with pytest.raises(StoreError, match="parent = 3 bytes"):
        GOLDEN.chain_keys(TOKENS, parent=b"abc")
    with pytest.raises(StoreError, match="head = True"):
        GOLDEN.chain_keys(TOKENS, head=True, parent=bytes(32))
    with pytest.raises(StoreError, match=r"bounds = \(0, 601\).*600"):
        GOLDEN.segment_keys(TOKENS, np.array([[0, 601]]))
    with pytest.raises(StoreError, match=r"bounds = \(5, 4\)"):
        GOLDEN.segment_keys(TOKENS, np.array([[5, 4]]))
    with pytest.raises(StoreError, match="bounds = -1"):
        GOLDEN.segment_keys(TOKENS, np.array([[-1, 4]]))
    with pytest.raises(StoreError, match="bounds = 3 numbers"):
        GOLDEN.segment_keys(TOKENS, np.array([0, 1, 2]))
    with pytest.raises(StoreError, match="bounds = a buffer of format 'i'"):
        GOLDEN.segment_keys(TOKENS, np.array([[0, 1]], dtype=np.int32))
    with pytest.raises(StoreError, match="positions = 1"):
        GOLDEN.context_digests(TOKENS, np.array([2, 1]))
    with pytest.raises(StoreError, match="positions = 601"):
        GOLDEN.context_digests(TOKENS, np.array([601]))


def test_context_digests_depend_on_every_token_before() -> None:
    """A digest covers the whole prefix and nothing behind it."""
    positions = np.array([10, 20], dtype=np.int64)
    changed = TOKENS.copy()
    changed[15] += np.uint32(1)
    one, other = (keys_of(GOLDEN.context_digests(tokens, positions)) for tokens in (TOKENS, changed))
    assert one[0] == other[0]
    assert one[1] != other[1]
    assert keys_of(tenant().context_digests(text(1, 5), np.array([0]))) != keys_of(
        tenant("b").context_digests(text(1, 5), np.array([0]))
    )
