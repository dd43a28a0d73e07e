"""Cases s01, s02, s03, s07, s10 and s11 from the field: segments, keys and identity."""

import dataclasses

import numpy as np
import pytest
from numpy.typing import NDArray

from blendstore.identity import ModelIdentity, namespace
from blendstore.segments import Segmentation, SeparatorSegmenter, derive_separator_ids
from tests.made_tokenizers import FAMILIES, MadeTokenizer, made

SEPARATOR = " # # "
SYSTEM, QUERY = "You are a helpful assistant.", "Who ran after the cat?"
PARTS = (SYSTEM, "The cat sat on the mat.", "A dog ran after the cat", QUERY)
IDENTITY = ModelIdentity(
    weights_digest=b"w" * 32, layers=30, kv_heads=3, head_dim=64, dtype="bfloat16", rotary_digest=b"r" * 32
)


def segmenter_of(tokenizer: MadeTokenizer) -> SeparatorSegmenter:
    bos = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)
    return SeparatorSegmenter(derive_separator_ids(tokenizer, SEPARATOR), bos)


def array(ids: list[int]) -> NDArray[np.uint32]:
    return np.array(ids, dtype=np.uint32)


def texts_of(tokenizer: MadeTokenizer, ids: list[int], cut: Segmentation) -> list[str]:
    return [tokenizer.decode(ids[s.start : s.stop]).strip() for s in cut.segments]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("way", ["one_string", "from_parts", "parts_with_bos"])
def test_case_s01_one_string_and_parts_give_four_segments(family: str, bos: bool, way: str) -> None:
    tokenizer = made(family)
    if way == "parts_with_bos":
        ids = tokenizer.encode(PARTS[0], add_special_tokens=bos)
        for part in PARTS[1:]:
            ids += tokenizer.encode(SEPARATOR, add_special_tokens=bos) + tokenizer.encode(part, add_special_tokens=bos)
    else:
        build = tokenizer.one_string if way == "one_string" else tokenizer.from_parts
        ids = build(PARTS, SEPARATOR, bos=bos)
    cut = segmenter_of(tokenizer).segment(array(ids))
    assert texts_of(tokenizer, ids, cut) == list(PARTS)
    assert [s.kind for s in cut.segments] == ["system", "document", "document", "query"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "document",
    ["see issue #42, and issue # 43", "a\n---\nb", "#include <x>\nint y;", "first [SEP] second", "### # heading"],
)
def test_case_s02_look_alikes_do_not_cut(family: str, document: str) -> None:
    tokenizer = made(family)
    for build in (tokenizer.one_string, tokenizer.from_parts):
        ids = build((SYSTEM, document, "B ends.", QUERY), SEPARATOR)
        found = texts_of(tokenizer, ids, segmenter_of(tokenizer).segment(array(ids)))
        assert found == [SYSTEM, document, "B ends.", QUERY]


@pytest.mark.parametrize("family", FAMILIES)
def test_case_s02_the_separator_within_a_document_splits_it_in_two(family: str) -> None:
    tokenizer = made(family)
    for build in (tokenizer.one_string, tokenizer.from_parts):
        ids = build((SYSTEM, "one half # # other half", "B", QUERY), SEPARATOR)
        found = texts_of(tokenizer, ids, segmenter_of(tokenizer).segment(array(ids)))
        assert found == [SYSTEM, "one half", "other half", "B", QUERY]


@pytest.mark.parametrize("family", FAMILIES)
def test_case_s03_document_alone_and_within_a_template_has_the_same_keys(family: str) -> None:
    tokenizer = made(family)
    segmenter, model = segmenter_of(tokenizer), namespace(IDENTITY)
    document = tokenizer.encode(PARTS[1] * 5, add_special_tokens=False)
    separator = tokenizer.encode(SEPARATOR, add_special_tokens=False)
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    template = tokenizer.encode("<|user|>\nRead this:", add_special_tokens=True)
    behind = tokenizer.encode("\n<|assistant|>", add_special_tokens=False)

    def document_keys(ids: list[int], number: int) -> bytes:
        cut = segmenter.segment(array(ids))
        segment = cut.segments[number]
        return model.chain_keys(array(ids[segment.start : segment.stop]).data, chunk_size=16)

    alone = document_keys(bos + document, 0)
    assert document_keys(template + separator + document + separator + behind, 1) == alone
    assert document_keys(template + separator + bos + document + separator + behind, 1) == alone
    assert len(alone) > 2 * 32


@pytest.mark.parametrize("family", FAMILIES)
def test_case_s07_prompts_of_odd_sizes(family: str) -> None:
    tokenizer = made(family)
    segmenter = segmenter_of(tokenizer)
    separator = tokenizer.encode(SEPARATOR, add_special_tokens=False)
    assert segmenter.segment(array([])).segments == ()
    only = segmenter.segment(array(separator))
    assert (only.segments, len(only.separators)) == ((), 1)
    assert len(segmenter.segment(array(tokenizer.encode("A", add_special_tokens=True))).segments) == 1
    ids = tokenizer.from_parts((SYSTEM, "", "A", QUERY), SEPARATOR)
    assert texts_of(tokenizer, ids, segmenter.segment(array(ids))) == [SYSTEM, "A", QUERY]


def test_case_s07_two_hundred_thousand_tokens() -> None:
    tokenizer = made("llama3")
    separator = tokenizer.encode(SEPARATOR, add_special_tokens=False)
    word = tokenizer.encode(" cat", add_special_tokens=False)[:1]
    ids = (word * 996 + separator) * 200
    cut = segmenter_of(tokenizer).segment(array(ids))
    assert len(ids) >= 199_000
    assert [len(s) for s in cut.segments] == [996] * 200
    one = segmenter_of(tokenizer).segment(array(word * 200_000))
    assert [len(s) for s in one.segments] == [200_000]


def key_of(tenant_salt: str = "", **changes: object) -> bytes:
    model = dataclasses.replace(IDENTITY, **changes)  # type: ignore[arg-type]
    return namespace(model, tenant_salt).digest


def test_case_s10_fields_do_not_run_into_each_other() -> None:
    assert key_of(lora="ab", lora_version="c") != key_of(lora="a", lora_version="bc")
    assert key_of(tenant_salt="shared") != key_of(lora="shared", lora_version="1")
    assert key_of(tenant_salt="a") != key_of(tenant_salt="b") != key_of()


def test_case_s10_any_name_gives_a_key_of_fixed_length() -> None:
    names = ["org/model", "a@b", "100%", "über", "x" * 300, "x" * 301, "系统", "a b", "a\0b"]
    keys = [key_of(lora=name, lora_version="1") for name in names]
    assert len(set(keys)) == len(names)
    assert {len(key) for key in keys} == {32}


def test_case_s11_models_that_differ_never_share() -> None:
    keys = [
        key_of(),
        key_of(dtype="float8_e4m3fn"),
        key_of(rotary_digest=b"q" * 32),
        key_of(weights_digest=b"v" * 32),
        key_of(lora="style", lora_version="digest of /a"),
        key_of(lora="style", lora_version="digest of /b"),
        key_of(layers=31),
        key_of(kv_heads=4),
        key_of(head_dim=128),
        key_of(tp_size=2),
        key_of(tp_size=2, tp_rank=1),
    ]
    assert len(set(keys)) == len(keys)
    assert key_of() == key_of()
