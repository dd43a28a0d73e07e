"""Small real models: found, converted once, and tokenized as they were trained."""

import hashlib
import importlib.util
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from blendstore.bench import corpus, gguf_tokenizer, models

PARTS = (("pack_a", "data/x.part0"), ("pack_b", "data/x.part1"))
CONTENT = (b"first half", b"second half")


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> models.PackagedModel:
    """A model in two installed packages, and a cache folder of its own."""
    folders = {}
    for (package, file), content in zip(PARTS, CONTENT, strict=True):
        path = tmp_path / package / file
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
        folders[package] = SimpleNamespace(submodule_search_locations=[str(tmp_path / package)])
    monkeypatch.setattr(importlib.util, "find_spec", folders.get)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    digest = hashlib.sha256(b"".join(CONTENT)).hexdigest()
    return models.PackagedModel("tiny", PARTS, digest, "pip install tiny", "CC0")


def test_parts_are_joined_checked_and_converted_once_even_by_several_at_a_time(
    packaged: models.PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def save(gguf: Path, folder: Path) -> None:
        seen.append(gguf.read_bytes())
        time.sleep(0.05)
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(models, "_save", save)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(models.convert(packaged))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [b"".join(CONTENT)]
    assert len(set(found)) == 1 and found[0].parent == models.cache_folder() and (found[0] / "config.json").is_file()
    assert found[0].name.startswith("tiny-")
    left = sorted(path.name for path in models.cache_folder().iterdir())
    assert left == [found[0].name, f"{found[0].name}.lock"]


def test_an_interrupted_conversion_leaves_nothing_that_looks_complete(
    packaged: models.PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "_save", save)
    with pytest.raises(KeyboardInterrupt):
        models.convert(packaged)
    assert [path.suffix for path in models.cache_folder().iterdir()] == [".lock"]


def test_missing_and_damaged_packages_name_the_command_that_helps(
    packaged: models.PackagedModel, tmp_path: Path
) -> None:
    (tmp_path / "pack_b" / "data" / "x.part1").write_bytes(b"second hal!")
    with pytest.raises(models.ModelNotFound, match=r"damaged.*pip install tiny"):
        models.convert(packaged)
    (tmp_path / "pack_b" / "data" / "x.part1").unlink()
    with pytest.raises(models.ModelNotFound, match=r"pack_b.*pip install tiny"):
        models.convert(packaged)
    with pytest.raises(models.ModelNotFound, match="smollm2, gemma3-270m or a folder"):
        models.resolve("no-such-model")


def test_other_contents_get_another_folder(packaged: models.PackagedModel, tmp_path: Path) -> None:
    before = models._digest(packaged.files())
    (tmp_path / "pack_a" / "data" / "x.part0").write_bytes(b"first holf")
    assert models._digest(packaged.files()) != before


def test_sentencepiece_merges_rank_by_the_score_of_the_piece_they_make() -> None:
    scored = {"a": -90.0, "b": -91.0, "c": -92.0, "▁": -93.0, "bc": -1.0, "ab": -2.0, "▁a": -3.0, "▁ab": -4.0}
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁▁", *scored]
    types = [3, 3, *[6] * 256, 4, *[1] * len(scored)]
    scores = [0.0] * (2 + 256) + [-1000.0, *scored.values()]
    backend = gguf_tokenizer._sentencepiece(pieces, types, scores, "<unk>")
    gguf_tokenizer._add_special_pieces(backend, pieces, types)

    def cut(text: str) -> list[str]:
        encoded = backend.encode(text, add_special_tokens=False)
        assert backend.decode(encoded.ids, skip_special_tokens=False) == text
        return list(encoded.tokens)

    assert cut("abc") == ["a", "bc"]  # bc is merged before ab
    assert cut(" ab") == ["▁ab"]
    assert cut("a   b") == ["a", "▁▁", "▁", "b"]  # user-defined runs come before merges
    assert cut("<s>a") == ["<s>", "a"]
    assert cut("aé") == ["a", "<0xC3>", "<0xA9>"]


@pytest.mark.real_model
def test_smollm2_is_a_plain_float32_model_with_its_own_tokenization() -> None:
    model, tokenizer = models.load("smollm2")
    assert model.dtype == torch.float32 and not model.training and model.config.num_hidden_layers == 30
    assert not hasattr(model.config, "quantization_config")
    cut = tokenizer.convert_ids_to_tokens(tokenizer.encode("The code is 4071.\n\n  5 x"))
    assert cut == ["The", "Ġcode", "Ġis", "Ġ", "4", "0", "7", "1", ".", "ĊĊĠĠ", "5", "Ġx"]
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>")[0] == tokenizer.bos_token_id == 1
    assert tokenizer.eos_token == "<|im_end|>" and "<|im_start|>" in tokenizer.chat_template
    for text in [*corpus.narrative(), *corpus.documents("jargon")[:100], "naïve ‘x’ — 漢字 \t\n \N{ROCKET}"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = torch.tensor([tokenizer.encode("Paris is the capital of France. Berlin is the capital of")])
    with torch.inference_mode():
        said = tokenizer.decode(model(ids).logits[0, -1].argmax())
    assert said == " Germany"
