"""What differs between the vLLM versions that this adapter knows: contexts and metadata of a forward of our own."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import vllm
from torch import Tensor
from vllm.forward_context import set_forward_context

from blendstore.startup import Refused

SUPPORTED = ("0.26", "0.32")


def check_version() -> None:
    """Raises `Refused` in a vLLM that the adapter wasn't tested with."""
    found = vllm.__version__
    if not any(found == minor or found.startswith(f"{minor}.") for minor in SUPPORTED):
        raise Refused(f"vLLM {found} is not supported: use {', '.join(SUPPORTED)}.x")


def attention_context(
    metadata: dict[str, Any] | None, config: Any, tokens: int, slots: dict[str, Tensor] | None = None
) -> AbstractContextManager[None]:
    """The engine's forward context of ``tokens`` rows; without ``metadata`` no attention of the engine may run."""
    context: AbstractContextManager[None] = set_forward_context(
        metadata, config, num_tokens=tokens, slot_mapping=slots or {}
    )
    return context


def prefill_metadata(runner: Any, slots: Tensor) -> dict[str, Any]:
    """Attention metadata, by layer name, of one new sequence whose n tokens go to ``slots`` [n], which fill blocks from
    their starts."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    n, device = len(slots), slots.device
    out: dict[str, Any] = {}
    for group in (group for groups in runner.attn_groups for group in groups):
        builder = group.get_metadata_builder()
        block = builder.kv_cache_spec.block_size
        ends = torch.tensor([0, n], dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=ends.to(device),
            query_start_loc_cpu=ends,
            seq_lens=torch.tensor([n], dtype=torch.int32, device=device),
            num_reqs=1,
            num_actual_tokens=n,
            max_query_len=n,
            max_seq_len=n,
            block_table_tensor=(slots[::block] // block).to(torch.int32)[None],
            slot_mapping=slots,
            seq_lens_cpu_upper_bound=torch.tensor([n], dtype=torch.int32),
        )
        metadata = builder.build(0, common)
        out.update(dict.fromkeys(group.layer_names, metadata))
    return out
