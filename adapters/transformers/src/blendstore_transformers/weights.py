"""Identity of the weights in memory: what a record's namespace is made from."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from transformers import PreTrainedModel

from blendstore.blend import Geometry
from blendstore.identity import ModelIdentity

_NAMES = ("name_or_path", "transformers_version")
_WHOLE = 1 << 30
_BLOCK = 1 << 14


def identity(model: PreTrainedModel, geometry: Geometry) -> ModelIdentity:
    """Identity of ``model`` as it is in memory: changed or merged weights are told apart, and so are equal weights that
    another configuration computes with; served names don't count."""
    return ModelIdentity(
        weights_digest=_digest(model),
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        dtype=geometry.element,
        rotary_digest=_rotary(model, geometry),
    )


def _digest(model: PreTrainedModel) -> bytes:
    """BLAKE2b over the configuration, and names, shapes and bytes of all parameters and kept buffers; above 1 GiB over
    64 evenly spaced blocks of each."""
    told = json.dumps(_computed_with(model.config.to_dict()), sort_keys=True, default=str).encode()
    digest = hashlib.blake2b(len(told).to_bytes(8, "little") + told, digest_size=32)
    saved = model.state_dict()
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in saved}
    whole = sum(t.numel() * t.element_size() for t in tensors.values()) <= _WHOLE
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}\0{tuple(tensor.shape)}\0{tensor.dtype}\0".encode())
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if not whole and flat.numel() > 64 * _BLOCK:
            starts = torch.linspace(0, flat.numel() - _BLOCK, 64).long().tolist()
            flat = torch.cat([flat[s : s + _BLOCK] for s in starts])
        digest.update(flat.cpu().numpy().data)
    return digest.digest()


def _computed_with(configured: Any) -> Any:
    """``configured`` without what says nothing about the numbers: names, paths, versions and private entries."""
    if not isinstance(configured, dict):
        return configured
    kept = ((str(key), value) for key, value in configured.items())
    return {key: _computed_with(value) for key, value in kept if key[:1] != "_" and key not in _NAMES}


def _rotary(model: PreTrainedModel, geometry: Geometry) -> bytes:
    """Of the tables as they are looked up, and of the configured parameters, which stand in where there is no table."""
    configured = json.dumps(getattr(model.config, "rope_parameters", None), sort_keys=True, default=str)
    digest = hashlib.blake2b(configured.encode(), digest_size=32)
    known: dict[int, bytes] = {}
    for table, window in zip(geometry.rotary, geometry.windows, strict=True):
        if table is None:
            part = b"none"
        elif id(table) in known:
            part = known[id(table)]
        else:
            cos, sin = table.lookup(torch.tensor([1, 97, 1009]))
            layout = f"{table.pairing}{table.pairs}".encode()
            part = known[id(table)] = layout + cos.numpy().tobytes() + sin.numpy().tobytes()
        digest.update(len(part).to_bytes(8, "little") + part + repr(window).encode())
    return digest.digest()
