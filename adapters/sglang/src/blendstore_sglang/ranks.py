"""Agreement of tensor-parallel ranks: each has its own store, and all must do the same to a prompt.

Every rank calls these in the same order, also when something failed on one of them: a call is a collective.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from blendstore.plan import BlendPlan


class Ranks:
    """The ranks of ``group`` (a process group of CPU tensors), or one alone."""

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.size = 1 if group is None else dist.get_world_size(group)

    def agreed(self, plan: BlendPlan | None, number: int) -> int | None:
        """The smallest ``number`` of all ranks if all have an equal plan, else None. A rank without one has failed."""
        if self.size == 1:
            return None if plan is None else number
        told = -1 if plan is None else _digest(plan)
        votes = torch.tensor([told, -told, number], dtype=torch.int64)
        dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=self._group)
        least, most, smallest = votes.tolist()
        return smallest if least == -most and plan is not None else None

    def all(self, well: bool) -> bool:
        """Whether it went well on every rank."""
        if self.size == 1:
            return well
        vote = torch.tensor([int(well)], dtype=torch.int64)
        dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=self._group)
        return bool(vote.item())

    def largest(self, number: float) -> float:
        """The largest ``number`` of all ranks."""
        if self.size == 1:
            return number
        told = torch.tensor([number], dtype=torch.float64)
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self._group)
        return float(told.item())


def _digest(plan: BlendPlan) -> int:
    """63 bits over what decides how a plan runs; where a rank keeps its records does not."""
    told = [(s.kind.value, s.start, s.stop, s.source, s.group, s.group_start) for s in plan.spans]
    return int.from_bytes(hashlib.blake2b(repr((plan.ntokens, told)).encode(), digest_size=8).digest()) >> 1
