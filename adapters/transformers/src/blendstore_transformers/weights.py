"""Identity of the weights in memory: what a record's namespace is made from."""

from __future__ import annotations

import hashlib
import json

import torch
from transformers import PreTrainedModel

from blendstore.blend import Geometry
from blendstore.identity import ModelIdentity

_WHOLE = 1 << 30
_BLOCK = 1 << 14


def identity(model: PreTrainedModel, geometry: Geometry) -> ModelIdentity:
    """Identity of ``model`` as it is in memory: changed or merged weights are told apart, served names don't count."""
    return ModelIdentity(
        weights_digest=_digest(model),
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        dtype=str(geometry.dtype).removeprefix("torch."),
        rotary_digest=_rotary(model, geometry),
    )


def _digest(model: PreTrainedModel) -> bytes:
    """BLAKE2b over names, shapes and bytes of all parameters; above 1 GiB over 64 evenly spaced blocks of each."""
    digest = hashlib.blake2b(digest_size=32)
    parameters = sorted(model.named_parameters())
    whole = sum(p.numel() * p.element_size() for _, p in parameters) <= _WHOLE
    for name, parameter in parameters:
        digest.update(f"{name}\0{tuple(parameter.shape)}\0{parameter.dtype}\0".encode())
        flat = parameter.detach().contiguous().view(-1).view(torch.uint8)
        if not whole and flat.numel() > 64 * _BLOCK:
            starts = torch.linspace(0, flat.numel() - _BLOCK, 64).long().tolist()
            flat = torch.cat([flat[s : s + _BLOCK] for s in starts])
        digest.update(flat.cpu().numpy().data)
    return digest.digest()


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
