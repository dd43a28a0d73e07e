"""Invariant 4: ranks that hold half of the heads each pick the same tokens, and those that one rank with all would.

The ranks are processes that reduce over gloo, as engines do it on CPU."""

import multiprocessing
import os
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from blendstore.blend import BlendRunner, BlendSettings
from blendstore.blend.drift import DriftSettings
from blendstore.blend.runner import BlendResult
from tests.fake_engine import FakeEngine, FakeRecords, scene

RANKS = 2
SETTINGS = {
    "deviation": BlendSettings("deviation", (0.15,)),
    "deviation at two layers": BlendSettings("deviation", (0.4, 0.2), check_layers=(1, 2)),
    "hybrid": BlendSettings("hybrid", (0.15,)),
    "query": BlendSettings("query", (0.1,)),
    "query, mean": BlendSettings("query", (0.1,), options={"reduce": "mean", "rows": 4}),
    "head": BlendSettings("head", (0.2,)),
    "random": BlendSettings("random", (0.2,), seed=3),
}


@dataclass
class Shard(FakeEngine):
    """One rank's heads of a `FakeEngine`: rows of the query, key and value weights, columns of the output weights."""

    rank: int = 0
    reduces_scores: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        query, keys = (self.part(heads * self.head_dim) for heads in (self.heads, self.kv_heads))
        self.weights = [(wq[query], wk[keys], wv[keys], wo[:, query], wm) for wq, wk, wv, wo, wm in self.weights]
        self.heads, self.kv_heads = self.heads // RANKS, self.kv_heads // RANKS
        self.geometry = replace(self.geometry, heads=self.heads, kv_heads=self.kv_heads)

    def part(self, count: int) -> slice:
        """This rank's share of ``count`` rows."""
        return slice(self.rank * count // RANKS, (self.rank + 1) * count // RANKS)

    def all_reduce(self, scores: Tensor) -> Tensor:
        return self.sum_of_ranks(scores) if self.reduces_scores else scores

    def sum_of_ranks(self, part: Tensor) -> Tensor:
        total = part.clone()
        dist.all_reduce(total)
        return total


def whole() -> FakeEngine:
    return FakeEngine(heads=8, kv_heads=4)


def run(settings: BlendSettings, shard: Shard | None = None) -> BlendResult:
    """Blends one scene with all heads, or with a rank's."""
    made = scene(whole())
    if shard is None:
        return BlendRunner(whole()).run(made.ids, made.plan, made.records, settings)
    mine = shard.part(whole().kv_heads)
    chunks = [[(k[:, mine], v[:, mine]) for k, v in layers] for layers in made.records.chunks]
    return BlendRunner(shard).run(made.ids, made.plan, FakeRecords(chunks), settings)


def serve(rank: int, folder: str) -> None:
    """A rank's process: blends with every setting and leaves its results in ``folder``."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    meeting, patience = f"file://{folder}/meeting", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS, timeout=patience)
    shard = Shard(heads=8, kv_heads=4, rank=rank)
    found = {name: run(settings, shard) for name, settings in SETTINGS.items()}
    alone = Shard(heads=8, kv_heads=4, rank=rank, reduces_scores=False)
    apart = run(replace(SETTINGS["deviation"], drift=None), alone).selected
    kept = {name: (result.selected, result.kv, result.state) for name, result in found.items()}
    torch.save((kept, apart), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


Results = list[tuple[dict[str, tuple[Tensor, Tensor, Tensor]], Tensor]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("ranks")
    spawning = multiprocessing.get_context("spawn")
    ranks = [spawning.Process(target=serve, args=(rank, str(folder))) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
    return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("name", SETTINGS)
def test_ranks_pick_the_tokens_that_a_single_rank_picks(results: Results, name: str) -> None:
    """And their halves of the KV are the single rank's, drift correction included."""
    wanted = run(SETTINGS[name])
    assert wanted.recomputed > 5
    for rank, (found, _) in enumerate(results):
        selected, kv, state = found[name]
        assert torch.equal(selected, wanted.selected)
        mine = slice(rank * 2, rank * 2 + 2)
        torch.testing.assert_close(kv, wanted.kv[:, :, :, mine], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(state, wanted.state, rtol=1e-4, atol=1e-4)


def test_without_the_reduction_ranks_would_pick_different_tokens(results: Results) -> None:
    """What the tests above could not fail without."""
    assert not torch.equal(results[0][1], results[1][1])
    assert DriftSettings() == SETTINGS["query"].drift, "drift correction is part of what was compared"
