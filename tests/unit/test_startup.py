"""What ranks of a tensor-parallel engine agree on when they start: whatever fails on one, none waits for ever, and all
go on alike."""

import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from blendstore import startup
from blendstore.blend import Attend
from blendstore.blend.selftest import GeometryError, Proof
from blendstore.codec import guard
from blendstore.config import Config, ConfigError
from blendstore.startup import Refused, Together, guarded, on_every_rank, proven
from tests.fake_engine import FakeEngine

T = TypeVar("T")
RANKS = 2
IDS = torch.randint(0, 97, (guard.TOKENS + guard.FORCED,), generator=torch.Generator().manual_seed(3)).tolist()


class Failing(FakeEngine):
    """An engine whose answers can be had: those to the first call are the reference. Call number ``fails`` fails."""

    fails = -1
    asked = 0
    moved = 0.0

    def answers(self, ids: Tensor, positions: Tensor, attends: Callable[[int], Attend]) -> Tensor:
        self.asked += 1
        if self.asked == self.fails:
            raise torch.OutOfMemoryError("the device is full")
        state = self.embed(ids)
        for index in range(self.layers):
            state = self.layer(index, state, positions, attends(index))
        return state @ self.embedding.T + self.moved * (self.asked - 1)


class Rank(threading.local):
    """Which rank the thread is."""

    number = -1


HERE = Rank()


def on_ranks(work: Callable[[Together], T]) -> list[T | Exception]:
    """What ``work(together)`` gives or raises on each of the ranks, which are threads."""
    barrier, told = threading.Barrier(RANKS, timeout=20), [0.0] * RANKS
    out: list[Any] = [None] * RANKS

    def together(number: float) -> float:
        told[HERE.number] = number
        barrier.wait()
        largest = max(told)
        barrier.wait()
        return largest

    def run(rank: int) -> None:
        HERE.number = rank
        try:
            out[rank] = work(together)
        except Exception as error:
            out[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not barrier.broken, "a rank waited for one that had gone another way"
    return out


@pytest.fixture
def config() -> Config:
    return Config.load(env={}, overrides={"enable_blending": True, "local_format": "int8", "codec_max_kl": 1.0})


class Tokenizer:
    """Of the packaged prose."""

    def encode(self, text: str) -> list[int]:
        ids: list[int] = IDS
        return ids


def measured(
    config: Config, monkeypatch: pytest.MonkeyPatch, *, fails: int = -1, where: str = "", nan: bool = False
) -> list[Any]:
    """`guarded` on both ranks, of which the second fails somewhere."""

    def tokenizer(path: str, trust: bool) -> Tokenizer:
        if where == "tokenizer" and HERE.number == 1:
            raise OSError("no tokenizer here")
        return Tokenizer()

    packed = guard._formatted

    def formatted(name: str, chunk: int, kv: Any) -> Tensor:
        if where == "code" and HERE.number == 1:
            raise torch.OutOfMemoryError("the device is full")
        return packed(name, chunk, kv)

    monkeypatch.setattr(startup, "_tokenizer", tokenizer)
    monkeypatch.setattr(guard, "_formatted", formatted)

    def work(together: Together) -> tuple[str, int]:
        model = Failing()
        if HERE.number == 1:
            model.fails, model.moved = fails, float("nan") if nan else 0.0
        found, given_up = guarded(
            config, model, "tokenizer", context=len(IDS), trust_remote_code=False, together=together
        )
        return found.local_format, given_up

    return on_ranks(work)


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ({"where": "tokenizer"}, "OSError: no tokenizer here"),
        ({"fails": 1}, "OutOfMemoryError: the device is full"),
        ({"where": "code"}, "OutOfMemoryError: the device is full"),
        ({"fails": 2}, "OutOfMemoryError: the device is full"),
    ],
    ids=["tokenizer", "own answers", "coding", "answers behind coded KV"],
)
def test_what_one_rank_can_not_measure_all_use_as_it_is_configured(
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failure: dict[str, Any],
    reason: str,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert measured(config, monkeypatch, **failure) == [("int8", 0)] * RANKS
    told = "\n".join(record.getMessage() for record in caplog.records)
    assert reason in told and "it failed on another rank" in told and told.count("measured") == RANKS


def test_what_is_no_number_on_one_rank_all_give_up(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where nothing fails, all measure the same and keep it."""
    assert measured(config, monkeypatch) == [("int8", 0)] * RANKS
    assert measured(config, monkeypatch, nan=True) == [("raw", 1)] * RANKS


def test_tables_that_one_rank_can_not_read_are_refused_on_all(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def codes(config: Config) -> dict[str, Any]:
        if HERE.number == 1:
            raise ConfigError("codec_tables: no such file")
        return {}

    monkeypatch.setattr(guard, "codes", codes)
    other, failed = measured(config, monkeypatch)
    assert isinstance(other, Refused) and isinstance(failed, ConfigError)


PROOF = Proof(48, 0.0, 0.0)


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("fails", ["make", "prove"])
def test_a_model_that_one_rank_can_not_prove_is_blended_on_none(fails: str, required: bool) -> None:
    """And a rank that has no model keeps none waiting for what the others compute together."""
    config = Config.load(env={}, overrides={"enable_blending": True, "require_blending": required})

    def work(together: Together) -> Any:
        def make() -> str:
            if (fails, HERE.number) == ("make", 1):
                raise GeometryError("layer 3: it differs")
            return "model"

        def prove(model: str) -> Proof:
            together(0.0)
            if (fails, HERE.number) == ("prove", 1):
                raise GeometryError("layer 3: it differs")
            return PROOF

        return proven(config, "Llama", make, prove, together=together)

    found: list[Any] = on_ranks(work)
    if required:
        assert [type(error) for error in found] == [Refused, GeometryError]
    else:
        assert [(model, proof) for model, proof, _ in found] == [(None, None)] * RANKS
        assert "another rank" in found[0][2] and found[1][2] == "layer 3: it differs"


def test_alone_everything_is_as_it_is_made() -> None:
    assert on_every_rank(lambda: 7, float) == 7
    with pytest.raises(ZeroDivisionError):
        on_every_rank(lambda: 1 / 0, float)


def test_without_a_model_the_warning_says_why(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(startup, "_tokenizer", lambda path, trust: Tokenizer())
    found, given_up = guarded(
        config, None, "", context=len(IDS), trust_remote_code=False, refusal="layer 1 has two attentions"
    )
    assert (found, given_up) == (config, 0)
    assert "local_format: not measured: layer 1 has two attentions" in caplog.text


@pytest.mark.parametrize(
    ("more", "lossy"),
    [({"enable_blending": True}, True), ({}, False), ({"local_format_exact": True}, True)],
    ids=["blending", "plain caching", "exact prefixes too"],
)
def test_a_format_is_measured_only_where_records_are_kept_in_it(more: dict[str, Any], lossy: bool) -> None:
    """Plain caching keeps exact prefixes, which stay raw unless it is said otherwise: nothing is built or proved."""
    config = Config.load(env={}, overrides={"local_format": "int4", **more})
    wanted = ("model", PROOF, "") if lossy else (None, None, "")
    assert proven(config, "Llama", lambda: "model", lambda model: PROOF) == wanted


def test_plain_caching_goes_on_where_only_the_guard_wants_a_model(caplog: pytest.LogCaptureFixture) -> None:
    """Also where blending would be required, if it were on; an error that nobody has thought of is a reason too."""
    given = {"local_format": "int4", "local_format_exact": True, "require_blending": True}
    config = Config.load(env={}, overrides=given)

    def make() -> str:
        raise TypeError("an argument is missing")

    assert proven(config, "Llama", make, lambda model: PROOF) == (None, None, "TypeError: an argument is missing")
    assert not caplog.records
