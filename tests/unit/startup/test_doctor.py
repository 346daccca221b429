"""The doctor says what a start would: the same figures, and the same refusals in the same words."""

from __future__ import annotations

import logging
import platform
import re
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from config import Settings, load_settings
from engine.compute.drafters.draft_tree import DraftTree
from engine.compute.drafters.medusa_heads import MedusaHeads
from engine.compute.loading.coded_weights import CodeKind
from engine.compute.loading.loader import load_model
from engine.compute.loading.locate import FoundModel, find_model
from engine.compute.loading.outline import outline_model, read_stored, weight_bytes
from engine.compute.native import compiler
from engine.compute.native.forms import NativeUnavailable, choose_build, forms_of
from engine.compute.native.weight_formats import weight_bytes_by_format
from engine.errors import StartRefused, UnsupportedModel
from engine.startup import doctor, memory_beside
from engine.startup.build import load_parts
from engine.startup.build_embeddings import load_embedding_parts
from engine.startup.doctor import diagnose
from tests.support.native import build_here, compiled_home, pretend_every_instruction
from tests.support.packed import load_tiny
from tests.support.quantized_checkpoints import Checkpoint, awq, fp8, mxfp4, save_quantized
from tests.support.tiny_eagle import TinyEagle
from tests.support.tiny_embedders import save_cross_encoder, save_embedder
from tests.support.tiny_gguf import save_block_gguf, save_tiny_gguf
from tests.support.tiny_models import (
    FAMILIES,
    MAX_POSITIONS,
    RECURRENT_FAMILIES,
    save_foreign_model,
    save_tiny_model,
    tiny_model,
)

# Instructions of another kind of CPU than this one.
OTHERS = "v3" if platform.machine() in ("aarch64", "arm64") else "neon"
BF16_NATIVE = any(form.is_here for form in forms_of()) or torch.cpu._is_amx_tile_supported()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


def settings_for(model: Path | str, *flags: str, home: Path | None = None) -> Settings:
    environ = {} if home is None else {"SLIPSTREAM_HOME": str(home)}
    return load_settings([str(model), "--kv-cache-memory", "1MiB", "--swap-space", "64KiB", *flags], environ)


@pytest.mark.parametrize("family", [*FAMILIES, *RECURRENT_FAMILIES])
def test_an_outline_has_the_shape_of_the_loaded_model(family: str, tmp_path: Path) -> None:
    settings = settings_for(save_tiny_model(family, tmp_path)).model.model_copy(update={"max_model_len": 64})
    stored = read_stored(find_model(settings, tmp_path))
    assert stored is not None
    outline, loaded = outline_model(*stored, settings), load_model(tmp_path, settings)
    for name in ("dtype", "device", "max_model_len", "vocab_size", "layers", "states", "rewindable"):
        assert getattr(outline, name) == getattr(loaded, name), name
    assert weight_bytes(outline.model) == weight_bytes(loaded.model)
    assert all(weights.is_meta for weights in outline.model.parameters())


def test_what_would_be_used_is_what_a_start_uses(model: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(model, tmp_path / "model"))
    (model / "generation_config.json").write_text('{"top_p": 0.9}')
    settings = settings_for(model, "--max-num-seqs", "8")
    found, parts = diagnose(settings), load_parts(settings)
    assert found.problems == [] and found.warnings == []
    assert found.device is not None and found.model is not None and found.cache is not None
    info = parts.info
    assert (found.device.device, found.model.dtype) == (info.device, info.dtype)
    assert (found.model.max_model_len, found.model.vocab_size) == (info.max_model_len, info.vocab_size)
    assert (found.cache.num_kv_blocks, found.cache.kv_bytes) == (info.num_kv_blocks, info.kv_bytes)
    assert found.cache.num_full_seqs == info.num_kv_blocks // (MAX_POSITIONS // 16)
    assert (found.cache.max_num_seqs, found.cache.max_num_batched_tokens) == (8, 2048)
    assert (info.max_num_seqs, info.max_num_batched_tokens, info.kv_block_size) == (8, 2048, 16)
    assert found.cache.size_origins == info.size_origins
    assert info.size_origins == {
        "max_num_seqs": "given",
        "max_num_batched_tokens": "default",
        "kv_block_size": "default",
    }
    assert found.model.has_chat_template is info.has_chat_template is True
    assert found.model.default_sampling == info.default_sampling == {"top_p": 0.9}
    assert found.drafts is not None and found.drafts.methods == info.draft_methods
    assert found.device.thread_counts[0] == found.device.num_threads
    assert info.compute_threads.split(":")[0] in map(str, found.device.thread_counts)


# With heads as wide as the kernels need them.
WIDE: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 32},
    "lfm2_hybrid": {"num_attention_heads": 2, "num_key_value_heads": 1},
}


@pytest.mark.parametrize("family", WIDE)
def test_the_scratch_of_the_kernels_is_counted_as_a_start_does(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they compute all of attention, or attend behind projections that stay."""
    for room in ("build", "doctor"):
        monkeypatch.setattr(f"engine.startup.{room}.worthwhile_threads", lambda: (2,))
    model = save_tiny_model(family, tmp_path)
    tiny_model(family, **WIDE[family]).save_pretrained(model)
    settings = settings_for(model, "--dtype", "bfloat16", home=compiled_home())
    found = diagnose(settings)
    assert found.model is not None
    assert found.model.scratch_bytes == load_parts(settings).info.scratch_bytes > 0


@pytest.mark.parametrize(
    "flags",
    [
        ("--num-kv-blocks", "3"),
        ("--kv-cache-memory", "20KiB"),
        ("--max-model-len", "100000"),
        ("--revision", "main"),
        ("--draft-model", "./no/such/dir"),
        ("--compile", "on", "--cpu-kernels", OTHERS),
        ("--medusa-heads", "./no/such/dir"),
    ],
)
def test_what_stops_a_start_is_a_problem_in_the_same_words(flags: tuple[str, ...], model: Path) -> None:
    settings = settings_for(model, *flags)
    with pytest.raises(StartRefused) as refused:
        load_parts(settings)
    assert diagnose(settings).problems == [str(refused.value)]


@pytest.mark.parametrize(
    ("flag", "ending", "words"),
    [
        ("--model", "/m", "cannot be read: File name too long"),
        ("--model", "/m.gguf", "cannot be read: File name too long"),
        ("--embedding-model", "/m", "cannot be read: File name too long"),
        ("--draft-model", "/m", "cannot be read: File name too long"),
        ("--draft-heads", "/m", "there is no config.json of a drafter in it"),
        ("--medusa-heads", "/m", "there is no config.json in it"),
    ],
)
def test_a_path_that_cannot_be_looked_at_is_a_problem(
    flag: str, ending: str, words: str, model: Path, tmp_path: Path
) -> None:
    """As one in a folder that is closed to this user: the system refuses to say whether it is there."""
    path = f"{tmp_path}/{'x' * 300}{ending}"
    settings = load_settings([flag, path, *(() if flag == "--model" else (str(model),))], {})
    (problem,) = diagnose(settings).problems
    assert words in problem and path in problem


def break_weights(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def break_template(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{% for %}")


def break_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


def make_bert(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": "t5"}')


def drop_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def break_config(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def close_folder(directory: Path) -> None:
    """As one that another user keeps to himself: the system refuses to say what is in it."""
    drop_config(directory)
    (directory / "config.json").symlink_to("x" * 300)


@pytest.mark.parametrize(
    "damage",
    [break_weights, break_template, break_tokenizer, make_bert, drop_config, break_config, close_folder],
)
def test_a_damaged_model_is_a_problem_in_the_same_words(damage: object, model: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(model, tmp_path / "model"))
    assert callable(damage)
    damage(directory)
    settings = settings_for(directory)
    with pytest.raises(StartRefused) as refused:
        load_parts(settings)
    assert diagnose(settings).problems == [str(refused.value)]


@pytest.mark.parametrize("kind", ["bert", "classifier"])
def test_a_model_of_another_kind_is_a_problem_in_the_words_of_loading(kind: str, tmp_path: Path) -> None:
    settings = settings_for(save_foreign_model(kind, tmp_path))
    load = load_embedding_parts if kind == "classifier" else load_parts
    with pytest.raises(StartRefused) as refused:
        load(settings)
    assert diagnose(settings).problems == [str(refused.value)]


def test_a_gguf_file_is_examined_before_it_is_converted(tmp_path: Path) -> None:
    home = tmp_path / "home"
    settings = settings_for(save_tiny_gguf(tmp_path / "tiny.gguf"), home=home)
    found = diagnose(settings)
    assert found.problems == []
    assert found.model is not None and found.cache is not None
    assert found.model.directory is None and found.model.pending == "converts it to safetensors, once"
    assert found.model.dtype == ("bfloat16" if BF16_NATIVE else "float32")
    assert list(home.rglob("*.safetensors")) == []
    parts = load_parts(settings)
    assert parts.info.num_kv_blocks == found.cache.num_kv_blocks
    again = diagnose(settings)
    assert again.model is not None and again.cache == found.cache
    assert again.model.pending is None and again.model.directory is not None


def test_quantized_weights_are_named_and_weighed_as_numbers(tmp_path: Path) -> None:
    plain = diagnose(settings_for(save_tiny_model("llama", tmp_path / "plain", dtype=torch.float16))).model
    save_quantized(tmp_path / "awq", awq())
    found = diagnose(settings_for(tmp_path / "awq", "--dtype", "float16"))
    assert not found.problems
    assert found.model is not None and plain is not None
    assert found.model.dtype_why == "to compute in; the weights are stored as AWQ, 4 bits in groups of 32"
    assert found.model.weight_bytes == plain.weight_bytes


@pytest.mark.parametrize(
    ("checkpoint", "family"),
    [(fp8((128, 128)), "llama"), (fp8((128, 128)), "qwen3_moe"), (mxfp4(), "gpt_oss")],
    ids=["fp8", "fp8 experts", "mxfp4"],
)
def test_weights_that_kernels_multiply_as_stored_are_weighed_so(
    checkpoint: Checkpoint, family: str, tmp_path: Path
) -> None:
    """Or a machine would be called too small for what it can serve."""
    build_here(formats=True)  # or skipped
    save_quantized(tmp_path, checkpoint, family, head_dim=32)
    found = diagnose(settings_for(tmp_path, "--dtype", "bfloat16")).model
    plain = diagnose(settings_for(tmp_path, "--dtype", "bfloat16", "--compile", "off")).model
    loaded = load_model(tmp_path, settings_for(tmp_path, "--dtype", "bfloat16").model)
    weights = sum(weight_bytes_by_format(loaded.model).values())
    assert found is not None and plain is not None
    assert found.weight_bytes is not None and plain.weight_bytes is not None
    assert found.weight_bytes == pytest.approx(weights, rel=0.03)
    assert found.weight_bytes < 0.9 * plain.weight_bytes


def test_a_format_that_is_not_served_is_a_problem_in_the_words_of_loading(tmp_path: Path) -> None:
    save_quantized(tmp_path, Checkpoint({"quant_method": "quip"}, awq().store))
    (problem,) = diagnose(settings_for(tmp_path)).problems
    assert problem.startswith(
        "LlamaForCausalLM cannot be served exactly: its weights are quantized by 'quip'"
    )
    with pytest.raises(UnsupportedModel) as refused:
        load_model(tmp_path, settings_for(tmp_path).model)
    assert str(refused.value) == problem


def test_a_model_that_is_not_here_is_said_to_be_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("engine.compute.loading.locate.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    found = diagnose(settings_for("nobody/such-a-model-name"))
    assert found.problems == []
    assert found.model is not None and found.model.pending == "downloads it from the Hugging Face hub"
    assert found.warnings == ["The model is not here yet: what it needs cannot be told."]


@pytest.mark.parametrize("method", ["auto", "mtp"])
def test_whether_a_model_that_is_here_in_part_brings_a_drafter_is_left_open(
    method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = save_tiny_model("qwen2", tmp_path / "model")
    (model / "model.safetensors").unlink()
    monkeypatch.setattr(
        "engine.startup.doctor.find_model", lambda *_: FoundModel("in part", model, pending="downloads it")
    )
    found = diagnose(settings_for(model, "--speculative-method", method))
    assert found.problems == [] and found.drafts is not None
    assert "mtp" not in found.drafts.methods


def test_a_draft_model_is_weighed_and_its_vocabulary_compared(model: Path, tmp_path: Path) -> None:
    found = diagnose(settings_for(model, "--draft-model", str(model)))
    assert found.problems == []
    assert found.drafts is not None and found.model is not None
    assert found.drafts.methods[-1] == "draft-model"
    assert found.drafts.model_bytes == found.model.weight_bytes
    assert (found.drafts.model_kv_bytes or 0) > 0
    other = Path(shutil.copytree(model, tmp_path / "other"))
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace("<|im_end|>", "<|elsewhere|>"))
    (problem,) = diagnose(settings_for(model, "--draft-model", str(other))).problems
    assert "has another vocabulary than the target" in problem


def test_heads_are_part_of_what_is_needed(model: Path, tmp_path: Path) -> None:
    target = load_tiny("llama")
    layer = TinyEagle(target).save(tmp_path / "layer")
    medusa = tmp_path / "medusa"
    MedusaHeads(target, 2, torch.arange(0, 512, 4), DraftTree.of_paths([(0,)])).save(medusa)
    without = diagnose(settings_for(model)).needed_bytes or 0
    for flag, directory, keeps in (("--draft-heads", layer, True), ("--medusa-heads", medusa, False)):
        found = diagnose(settings_for(model, flag, str(directory)))
        assert found.problems == [] and found.drafts is not None and found.needed_bytes is not None
        assert (found.drafts.reader_bytes or 0) > 0
        assert bool(found.drafts.reader_kv_bytes) == keeps
        heads_bytes = (found.drafts.reader_bytes or 0) + (found.drafts.reader_kv_bytes or 0)
        assert found.needed_bytes - without == heads_bytes


def test_a_recurrent_model_drafts_and_the_rows_of_drafts_are_counted(tmp_path: Path) -> None:
    model = save_tiny_model(RECURRENT_FAMILIES[0], tmp_path)
    flags = ("--max-model-len", "64", "--max-num-seqs", "4")
    found = diagnose(settings_for(model, *flags))
    without = diagnose(settings_for(model, *flags, "--speculative-method", "none"))
    assert found.drafts is not None and "ngram" in found.drafts.methods
    assert found.cache is not None and without.cache is not None
    assert found.cache.seats_bytes > without.cache.seats_bytes > 0
    assert all(0 < each.host_bytes <= 1 << 30 for each in (found.cache, without.cache)), "states are swapped"
    assert found.warnings == without.warnings == []
    cache = found.cache
    assert 0 < cache.num_snapshots * 1000 < cache.snapshot_bytes
    assert found.needed_bytes is not None and found.model is not None
    weights = (found.model.weight_bytes or 0) + found.model.scratch_bytes
    assert found.needed_bytes - weights == cache.kv_bytes + cache.seats_bytes + cache.snapshot_bytes


def test_a_dtype_that_the_cpu_lacks_is_a_warning(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        found = diagnose(settings_for(model, "--dtype", "float16", "--device", "cpu", "--compile", "off"))
    assert found.model is not None and found.model.dtype == "float16"
    assert found.warnings == ["This CPU does not compute float16 natively: --dtype float32 is faster."]
    assert found.device is not None and found.device.why == "asked for by --device cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_a_problem(model: Path) -> None:
    found = diagnose(settings_for(model, "--device", "cuda"))
    assert set(found.problems) == {"--device cuda: no CUDA device is available; use auto or cpu."}
    assert found.device is None and found.model is not None


def test_compiled_kernels_are_foreseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_every_instruction(monkeypatch)
    monkeypatch.setattr(compiler, "_COMPILERS", ("true",))
    model, home = save_tiny_model("llama", tmp_path / "model"), tmp_path / "home"

    def told(*flags: str) -> str | None:
        found = diagnose(settings_for(model, "--dtype", "bfloat16", *flags, home=home))
        assert found.model is not None and found.problems == []
        return found.model.compiled

    # Heads of 16 are too narrow for attention.
    fastest = forms_of()[0].name
    modules = f"{fastest}: 2 MLPs, 5 norms, 9 projections"
    assert told() == f"{modules}; the first start compiles them, in a few seconds"
    monkeypatch.setattr("engine.compute.native.install.find_library", lambda home, build: home)
    assert told("--compile", "on") == modules
    assert told("--compile", "off") == "not used: --compile off"
    assert told("--dtype", "float32") == modules.replace(fastest, choose_build(torch.float32).form.name)
    assert told("--cpu-kernels", "v3") == modules.replace(fastest, "v3")
    monkeypatch.setattr("engine.compute.native.install.find_library", lambda home, build: None)
    monkeypatch.setattr(compiler, "_COMPILERS", ("no-such-compiler",))
    assert told() == "not used: there is no C++ compiler (no-such-compiler)"
    assert not home.exists(), "looking changes nothing"


def test_a_gguf_file_that_is_run_as_it_is(tmp_path: Path) -> None:
    """What its weights take is what the file has, not what they would unpack to."""
    path = tmp_path / "model.gguf"
    save_block_gguf(path, "llama", [gguf.GGMLQuantizationType.Q4_K])
    settings = load_settings([str(path)], environ={"SLIPSTREAM_HOME": str(tmp_path / "home")})
    model = diagnose(settings).model
    assert model is not None and model.weight_bytes is not None and model.num_parameters is not None
    assert model.pending == "reads its tokenizer and settings, once"
    assert model.compiled is not None and "the first start compiles them" in model.compiled
    assert model.dtype_why == "to compute in; the weights stay in Q4_K, F32"
    assert model.weight_bytes < model.num_parameters


def test_an_embedding_model_beside_the_model_or_alone(model: Path, tmp_path: Path) -> None:
    embedder = save_embedder(tmp_path / "embedder")
    found = diagnose(settings_for(model, "--embedding-model", str(embedder)))
    assert found.problems == [] and found.model is not None and found.embeddings is not None
    facts = found.embeddings
    assert (facts.architecture, facts.pooling, facts.max_model_len) == ("BertModel", ("mean",), 64)
    assert found.needed_bytes is not None and facts.weight_bytes is not None
    alone = diagnose(settings_for(embedder))
    assert alone.problems == [] and alone.model is None and alone.embeddings == facts


def test_an_embedding_model_that_a_start_refuses(model: Path, tmp_path: Path) -> None:
    nowhere = settings_for(model, "--embedding-model", str(tmp_path / "nowhere"))
    labels = settings_for(save_cross_encoder(tmp_path / "labels", num_labels=3))
    embedder = save_embedder(tmp_path / "embedder")
    twice = settings_for(embedder, "--embedding-model", str(embedder))
    for settings, match in (
        (nowhere, "no directory"),
        (labels, "3 scores"),
        (twice, "an embedding model itself"),
    ):
        (problem,) = diagnose(settings).problems
        assert match in problem
        with pytest.raises(StartRefused, match=re.escape(problem)):
            load_embedding_parts(settings)


def keep_every_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend a GPU that multiplies codes of all kinds."""
    for room in (doctor, memory_beside):
        monkeypatch.setattr(room, "kept_kinds", lambda *_: frozenset(CodeKind))


def test_what_codes_take_is_what_a_gpu_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_quantized(tmp_path, awq())
    settings = settings_for(tmp_path, "--dtype", "float32")
    plain = diagnose(settings).model
    keep_every_code(monkeypatch)
    coded = diagnose(settings).model
    assert plain is not None and coded is not None
    assert plain.weight_bytes is not None and coded.weight_bytes is not None
    assert coded.weight_bytes < 0.6 * plain.weight_bytes and coded.num_parameters == plain.num_parameters


@pytest.mark.parametrize("asked", ["int8", "int4"])
def test_rounded_weights_are_foreseen_for_a_gpu(
    asked: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_every_code(monkeypatch)

    def for_cpus(*_: object, **__: object) -> str:
        raise NativeUnavailable("they are for CPUs, the model is on cuda:0")

    monkeypatch.setattr(doctor, "foresee", for_cpus)
    found = diagnose(settings_for(model, "--quantization", asked))
    assert found.model is not None and found.problems == []
    assert str(found.model.quantized).startswith(f"{asked}: ")
    assert found.model.compiled == "not used: they are for CPUs, the model is on cuda:0"
