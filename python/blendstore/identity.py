"""Which KV bytes are interchangeable: everything about a model that changes them, as the fields of a namespace.

Two caches may share a record only if every field is equal, so a field that is forgotten here is a wrong answer later.
The served name is not among them: it says nothing about the weights behind it.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from blendstore._core import Namespace

__all__ = ["IdentityError", "ModelIdentity", "namespace", "weights_digest"]

_SCHEMA = b"blendstore.namespace/1"
_CONFIGS = ("config.json", "adapter_config.json")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
_WHOLE = 64 << 20
_BLOCK = 1 << 20
_BLOCKS = 64


class IdentityError(ValueError):
    """A model that can't be told apart from others; the message names the field or path and the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """What decides the bytes of a model's KV cache on one rank."""

    weights_digest: bytes
    """Of the content of configuration and weights: see `weights_digest`."""
    layers: int
    kv_heads: int
    """KV heads held by this rank."""
    head_dim: int
    dtype: str
    """Element type of the cached bytes, for instance ``bfloat16``."""
    rotary_digest: bytes
    """Of every rotary table: bases, scaling, partial dimensions, pairing."""
    tp_rank: int = 0
    tp_size: int = 1
    lora: str = ""
    """Name of the adapter, empty for the base model."""
    lora_version: str = ""
    """Digest of the adapter's content; needed with ``lora``, because a name can be loaded again from elsewhere."""
    kept: str = "raw"
    """How records are kept (`Config.kept`): those of a lossy format are none for who keeps them raw."""

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "tp_size"):
            if getattr(self, name) < 1:
                raise IdentityError(f"{name} is {getattr(self, name)}; give a number of at least 1")
        if not 0 <= self.tp_rank < self.tp_size:
            raise IdentityError(f"tp_rank is {self.tp_rank}; give a rank from 0 to tp_size - 1 = {self.tp_size - 1}")
        for name in ("weights_digest", "rotary_digest", "dtype"):
            if not getattr(self, name):
                raise IdentityError(f"{name} is empty, so different models could share bytes; give its value")
        if self.lora and not self.lora_version:
            raise IdentityError(f"lora is {self.lora!r} without lora_version; give a digest of the adapter's content")

    def fields(self) -> list[tuple[str, bytes]]:
        """Name and bytes of every field, in the fixed order of the schema; numbers are 8 bytes, little-endian."""
        return [
            ("schema", _SCHEMA),
            ("weights_digest", self.weights_digest),
            ("layers", _number(self.layers)),
            ("kv_heads", _number(self.kv_heads)),
            ("head_dim", _number(self.head_dim)),
            ("dtype", self.dtype.encode()),
            ("rotary_digest", self.rotary_digest),
            ("tp_rank", _number(self.tp_rank)),
            ("tp_size", _number(self.tp_size)),
            ("lora", self.lora.encode()),
            ("lora_version", self.lora_version.encode()),
            ("kept", self.kept.encode()),
        ]


def namespace(identity: ModelIdentity, tenant_salt: str | bytes = "") -> Namespace:
    """The namespace of a model for one tenant. The salt is a secret: without it no key can be computed."""
    salt = tenant_salt.encode() if isinstance(tenant_salt, str) else tenant_salt
    return Namespace(identity.fields(), salt=salt)


def weights_digest(path: Path) -> bytes:
    """32 bytes (BLAKE2b) over the configuration and every weight file of a model or adapter at ``path``.

    ``path`` is a directory with ``config.json`` (or ``adapter_config.json``) and weight files, or one weight file. Of
    each weight file its name, its size and its content count: all of it below 64 MiB, beyond that 64 blocks of 1 MiB,
    evenly spaced, first and last included. A change to a big file that misses every sampled block and keeps the size is
    not seen; fine-tuning and quantisation change all of them. Raises `IdentityError` when something is missing.
    """
    if path.is_file():
        configs, weights = [], [path]
    elif path.is_dir():
        configs = [path / name for name in _CONFIGS if (path / name).is_file()]
        weights = sorted(file for file in path.iterdir() if file.suffix in _WEIGHTS and file.is_file())
    else:
        raise IdentityError(f"{path} is no file or directory; give the place of the model's weights")
    if not weights:
        raise IdentityError(f"{path} holds no weight files ({', '.join(_WEIGHTS)}); give the place of the weights")
    if path.is_dir() and not configs:
        raise IdentityError(f"{path} holds no {' or '.join(_CONFIGS)}; the weights alone do not tell the geometry")
    digest = hashlib.blake2b(digest_size=32, person=b"bs-weights/1")
    for file in configs:
        _absorb(digest, b"config", file.name.encode(), file.read_bytes())
    for file in weights:
        _absorb(digest, b"weights", file.name.encode(), _number(file.stat().st_size), _content_digest(file))
    return digest.digest()


def _content_digest(file: Path) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size < _WHOLE:
            while block := stream.read(_BLOCK):
                digest.update(block)
        else:
            for index in range(_BLOCKS):
                stream.seek((size - _BLOCK) * index // (_BLOCKS - 1))
                digest.update(stream.read(_BLOCK))
    return digest.digest()


def _absorb(digest: hashlib.blake2b, *parts: bytes) -> None:
    """Length-framed, so that no two lists of parts give the same bytes."""
    for part in parts:
        digest.update(_number(len(part)) + part)


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little")
