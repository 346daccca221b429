"""Whatever lies where a model should be: one line on stderr, exit code 2, and nothing of it has run."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.security.starts import Ended, starts
from tests.support.tiny_gguf import save_tiny_gguf
from tests.support.tiny_models import save_tiny_model, tiny_model

Damage = Callable[[Path], object]
COMMON = ("--port", "0", "--log-level", "error", "--dtype", "float32", "--kv-cache-memory", "16MiB")


def edit(file: str, **changes: object) -> Damage:
    def damage(directory: Path) -> None:
        path = directory / file
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def put(file: str, content: bytes) -> Damage:
    return lambda directory: (directory / file).write_bytes(content)


def instead(file: str, make: Callable[[Path], object]) -> Damage:
    def damage(directory: Path) -> None:
        (directory / file).unlink()
        make(directory / file)

    return damage


def with_header(**changes: object) -> Damage:
    """Change what the weights' header says of its first tensor."""

    def damage(directory: Path) -> None:
        path = directory / "model.safetensors"
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        next(value for name, value in header.items() if name != "__metadata__").update(changes)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])

    return damage


def empty(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()


def only_pickles(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    torch.save(tiny_model("llama").state_dict(), directory / "pytorch_model.bin")


def ship_code(directory: Path) -> None:
    """An architecture that only exists as code, which would leave a mark."""
    mark = directory / "was_here"
    (directory / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": "evil.T"}
    edit("config.json", auto_map=auto_map, model_type="evil")(directory)
    edit("tokenizer_config.json", auto_map=auto_map)(directory)


DEEP = b'{"a":' + b"[" * 100_000
NAN = float("nan")

DAMAGED: dict[str, Damage] = {
    "no files at all": empty,
    "pickled weights": only_pickles,
    "code": ship_code,
    "a header of 2^62 bytes": put("model.safetensors", struct.pack("<Q", 1 << 62) + b"{}"),
    "a deep header": put("model.safetensors", struct.pack("<Q", len(DEEP)) + DEEP),
    "an unknown dtype": with_header(dtype="F33"),
    "another dtype": with_header(dtype="F64"),
    "a shape of NaN": with_header(shape=[NAN, 64]),
    "a negative shape": with_header(shape=[-1, 64]),
    "a shape that overflows": with_header(shape=[2**32, 2**32]),
    "offsets that overlap": with_header(data_offsets=[0, 1 << 40]),
    "offsets in reverse": with_header(data_offsets=[8, 4]),
    "weights in a pipe": instead("model.safetensors", os.mkfifo),
    "weights in a loop of links": instead("model.safetensors", lambda path: path.symlink_to(path.name)),
    "a directory of that name": instead("config.json", Path.mkdir),
    "a configuration in a pipe": instead("config.json", os.mkfifo),
    "a deep configuration": put("config.json", DEEP),
    "an unknown architecture": edit("config.json", model_type="no-such"),
    "2^40 layers": edit("config.json", num_hidden_layers=2**40),
    "a width of 2^70": edit("config.json", hidden_size=2**70),
    "a width in words": edit("config.json", hidden_size="wide"),
    "heads that do not divide": edit("config.json", num_attention_heads=0),
    "no context": edit("config.json", max_position_embeddings=0),
    "no rotary setting": edit("config.json", rope_parameters={"rope_type": "yarn"}),
    "a deep tokenizer": put("tokenizer.json", DEEP),
    "a tokenizer that is null": put("tokenizer.json", b"null"),
    "a tokenizer of no known kind": edit("tokenizer.json", model={"type": "Evil"}),
    "a tokenizer that is code": edit("tokenizer_config.json", tokenizer_class=5),
    "a template that is broken": put("chat_template.jinja", b"{% for"),
    "a template that wants out": put("chat_template.jinja", b"{{ ''.__class__.__mro__[1] }}"),
    "a template as large as a book": put("chat_template.jinja", b"{{ 'a' }}" * 100_000),
}
FILES = {
    "an empty GGUF": b"",
    "text called GGUF": b"hello" * 1000,
    "a GGUF of 2^63 tensors": b"GGUF" + struct.pack("<IQQ", 3, 1 << 63, 0),
}


FILE_BYTES = 20_000  # more than any file of the tiny model but its weights

FULL_DISK = "a disk that fills while converting"


def forbid(directory: Path) -> None:
    for path in directory.iterdir():
        path.chmod(0)


if os.geteuid():  # nothing is forbidden to root
    DAMAGED["files that may not be read"] = forbid


def make_models(root: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What to serve, by what is wrong with it."""
    good = save_tiny_model("llama", root / "good")
    paths: dict[str, Path] = {}
    for number, (what, damage) in enumerate(DAMAGED.items()):
        paths[what] = shutil.copytree(good, root / f"model-{number}")
        damage(paths[what])
    for number, (what, content) in enumerate(FILES.items()):
        paths[what] = root / f"{number}.gguf"
        paths[what].write_bytes(content)
    paths[FULL_DISK] = save_tiny_gguf(root / "good.gguf")
    for what, path in paths.items():
        yield what, (str(path), *COMMON)
    # What drafts for a good model is no better trusted.
    for what in (
        "pickled weights",
        "a deep header",
        "a shape that overflows",
        "2^40 layers",
        "no files at all",
    ):
        yield f"a draft model with {what}", (str(good), "--draft-model", str(paths[what]), *COMMON)
        yield f"heads with {what}", (str(good), "--medusa-heads", str(paths[what]), *COMMON)


def is_one_line(ended: Ended) -> bool:
    """The command's own, about as long as a path and a reason are."""
    said = ended.said
    return said.startswith("slipstream: ") and said.count("\n") == 1 and len(said) < 500


# One of each file and of each part that reads it: the others differ in what is wrong there.
SOME = {
    *("no files at all", "pickled weights", "code", "a deep header", "a shape that overflows", FULL_DISK),
    *("weights in a pipe", "a deep configuration", "2^40 layers", "a deep tokenizer", "text called GGUF"),
    *("a template that wants out", "a draft model with a deep header", "heads with pickled weights"),
}


@pytest.mark.by_default("some")
@pytest.mark.parametrize("which", ["some", "all"])
@pytest.mark.timeout(300)
def test_a_hostile_model_is_one_line_and_exit_code_2(which: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    models = {what: words for what, words in make_models(tmp_path) if which == "all" or what in SOME}
    assert set(models) >= SOME
    ended = starts(models, home, FILE_BYTES)
    assert {what: end for what, end in ended.items() if end.code != 2 or not is_one_line(end)} == {}
    assert "cannot be stored" in ended[FULL_DISK].said
    assert not list(tmp_path.rglob("was_here"))
    left = [path.name for path in (home / "models").iterdir() if path.suffix != ".lock"]
    assert not left, "nothing was converted that could be used later"
