"""What lies on a GPU beside a model's own: whose files are counted for which flags, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from config import Settings, load_settings
from engine.compute.cuda.graphs.recorded_rounds import recorded_round_bytes
from engine.compute.cuda.graphs.step_graphs import GraphLimits, graph_bytes
from engine.compute.drafters.draft_loader import TargetRoom, draft_model_settings, load_draft_model
from engine.compute.drafters.draft_tree import DraftTree
from engine.compute.drafters.drafter_weights import eagle_bytes, medusa_bytes, mtp_bytes
from engine.compute.drafters.eagle import EagleDrafter
from engine.compute.drafters.medusa_heads import MedusaHeads
from engine.compute.drafters.mtp_layouts import find_mtp
from engine.compute.drafters.mtp_loader import load_mtp_drafter
from engine.compute.loading.coded_weights import CodeKind
from engine.compute.loading.loader import LoadedModel, load_model
from engine.compute.loading.locate import FoundModel
from engine.compute.runner.model_runner import ForDrafts
from engine.startup import build, kv_room, memory_beside
from engine.startup.build import load_parts
from engine.startup.build_runner import recorded_bytes
from engine.startup.build_speculation import draft_model_room, eagle_room, load_sources
from engine.startup.diagnosis import Diagnosis, DraftFacts
from engine.startup.doctor import _examine_cache, _weigh_reader, diagnose
from engine.startup.host_memory import memory_bytes
from engine.startup.memory_beside import foresee_memory_beside, round_bytes
from engine.startup.step_sizes import MemoryBeside, ModelNeeds
from tests.support.native import WITHOUT_KERNELS
from tests.support.packed import load_tiny
from tests.support.quantized_checkpoints import awq, save_quantized
from tests.support.tiny_eagle import WINDOW, TinyEagle
from tests.support.tiny_embedders import MAX_TOKENS, make_model, save_embedder
from tests.support.tiny_models import save_tiny_model, tiny_model
from tests.support.tiny_mtp import FAMILIES, TinyMtp

GPU = torch.device("cuda", 0)
MEDUSA = ForDrafts(keeps_features=True)
# With room for all that drafters may keep, for some of it, and for no more than one sequence.
ROOMS = (TargetRoom(4, 16, 1 << 30), TargetRoom(4, 16, 3 << 19), TargetRoom(4, 16, 0))


def on_gpu(loaded: LoadedModel) -> LoadedModel:
    """The same as if it were there: its weights are not looked at."""
    return replace(loaded, device=GPU)


def settings_for(*flags: str) -> Settings:
    """Others are loaded on this machine's CPU: their sizes are the same there."""
    return load_settings(["a/model", "--device", "cpu", "--dtype", "float32", *flags], {})


def beside(*flags: str, target: LoadedModel | None = None, directory: Path | None = None) -> MemoryBeside:
    return foresee_memory_beside(settings_for(*flags), on_gpu(target or load_tiny("llama")), directory)


def bytes_of(model: Any) -> int:
    return sum(each.numel() * each.itemsize for each in model.parameters())


def held(reads: ForDrafts, target: LoadedModel, seats: int = 4) -> int:
    """What sequences hold of features, where the longest draft is left open."""
    return reads.held_bytes(target, seats, max_drafts=32)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("models") / "draft")


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyEagle(load_tiny("llama")).save(tmp_path_factory.mktemp("models") / "layer")


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "heads"
    MedusaHeads(load_tiny("llama"), 2, torch.arange(0, 512, 4), DraftTree.of_paths([(0,)])).save(directory)
    return directory


def test_without_others_there_is_nothing() -> None:
    assert beside() == beside("--speculative-method", "none") == MemoryBeside(0, 0)


def test_a_cpu_sets_nothing_aside(draft: Path) -> None:
    settings = settings_for("--draft-model", str(draft))
    assert foresee_memory_beside(settings, load_tiny("llama"), None) == MemoryBeside()


def test_a_draft_model_on_the_cpu_takes_nothing_of_a_gpu(draft: Path) -> None:
    flags = ["a/model", "--device", "cuda", "--dtype", "float32", "--draft-model", str(draft)]
    settings = load_settings([*flags, "--draft-device", "cpu"], {})
    assert draft_model_settings(settings).device == "cpu"
    assert draft_model_settings(load_settings(flags, {})).device == "cuda"
    target = on_gpu(load_tiny("llama"))
    assert foresee_memory_beside(settings, target, None) == MemoryBeside()
    large = TargetRoom(4, 16, 1 << 60)
    host = memory_bytes()
    assert host is not None
    assert draft_model_room(settings, target, large).kv_bytes <= host[0]
    assert draft_model_room(settings, load_tiny("llama"), large) == large


def test_a_draft_models_weights_are_those_of_its_outline(draft: Path) -> None:
    plain = bytes_of(tiny_model("llama"))
    # Tables of angles are weights, too.
    assert plain <= beside("--draft-model", str(draft)).drafts < plain + 4096
    halved = settings_for("--draft-model", str(draft), "--dtype", "bfloat16")
    found = foresee_memory_beside(halved, on_gpu(load_tiny("llama")), None).drafts
    assert plain // 2 <= found < plain // 2 + 4096
    assert beside("--draft-model", str(draft), "--speculative-method", "ngram").drafts == 0


def test_a_draft_model_whose_codes_stay_counts_as_much_as_these(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save_quantized(tmp_path, awq())
    unpacked = beside("--draft-model", str(tmp_path)).drafts
    monkeypatch.setattr(memory_beside, "kept_kinds", lambda *_: frozenset(CodeKind))
    assert 0 < beside("--draft-model", str(tmp_path)).drafts < 0.6 * unpacked


def test_heads_and_modules_count_as_they_are_chosen(layer: Path, heads: Path, tmp_path: Path) -> None:
    target = load_tiny("llama")
    of_layer, of_heads = eagle_bytes(layer, target), medusa_bytes(heads, target)
    assert 0 < of_layer != of_heads > 0
    assert beside("--draft-heads", str(layer)).total == of_layer
    assert beside("--medusa-heads", str(heads)).total == of_heads
    scores = 2 * 4 * (2 * 128) * 4 + (40 << 22)  # of two heads over 128 tokens, for four sequences
    assert beside("--medusa-heads", str(heads)).kept_bytes(ROOMS[0]) == held(MEDUSA, target) + scores
    assert beside("--draft-heads", str(layer), "--speculative-method", "suffix").drafts == 0
    directory = TinyMtp("mimo").save(tmp_path)
    settings = load_settings([str(directory), "--dtype", "float32"], environ=WITHOUT_KERNELS)
    with_module = load_model(directory, settings.model)
    layout = find_mtp(directory, with_module.config)
    assert layout is not None
    of_module = mtp_bytes(directory, with_module, layout)
    assert beside(target=with_module, directory=directory).total == of_module
    assert beside("--speculative-method", "heads", target=with_module, directory=directory).drafts == 0


def test_a_draft_model_and_heads_add_up(draft: Path, layer: Path) -> None:
    both = beside("--draft-model", str(draft), "--draft-heads", str(layer))
    apart = (beside("--draft-model", str(draft)), beside("--draft-heads", str(layer)))
    assert both.drafts == sum(each.drafts for each in apart)


@pytest.mark.parametrize("room", ROOMS)
def test_a_draft_model_keeps_what_it_takes_for_k_v_and_its_recorded_steps(
    room: TargetRoom, draft: Path
) -> None:
    target = load_tiny("llama")
    target = replace(target, max_model_len=target.max_model_len - 40)  # no draft is behind it
    settings = settings_for("--draft-model", str(draft))
    told = foresee_memory_beside(settings, on_gpu(target), draft)
    drafter = load_draft_model(settings, target, draft, room)
    tensors = drafter._kv.tensors
    limits = GraphLimits(room.max_num_seqs, -(-target.max_model_len // room.block_size), max_draft_tokens=1)
    recorded = graph_bytes(target, limits)
    assert recorded > 0
    assert told.kept_bytes(room) == sum(each.nbytes for each in tensors.tensors) + recorded


def test_what_drafts_were_drawn_from_is_kept_where_it_is_told(draft: Path) -> None:
    def kept(*more: str) -> int:
        return beside("--draft-model", str(draft), *more).kept_bytes(ROOMS[0])

    of_one = load_tiny("llama").vocab_size * 4
    told = ("--draft-verification", "rejection")
    assert kept(*told) - kept() == 4 * (2 * 4 + 1) * of_one, "four being verified, five more on the way"
    longer = ("--num-speculative-tokens", "7")
    assert kept("--draft-verification", "block", *longer) - kept(*longer) == 4 * (2 * 7 + 1) * of_one
    for more in (("--draft-device", "cpu"), ("--speculative-method", "ngram")):
        assert kept(*told, *more) == 0


@pytest.mark.parametrize(("slabs_bytes", "num_slabs"), [(1 << 26, 4), (3.5, 3), (0, 1)])
def test_a_layer_keeps_what_its_slabs_take(slabs_bytes: float, num_slabs: int, layer: Path) -> None:
    """For all seats, for as many as a tenth of the target's K/V holds, and for one at least.

    Features of the target's own sequences come upon it, of all seats.
    """
    of_one = (2 * WINDOW + 16) * 2 * (32 + 32) * 4  # two windows and the longest chain
    room = TargetRoom(4, 16, 10 * int(slabs_bytes * of_one))
    target, flags = load_tiny("llama"), ("--draft-heads", str(layer), "--speculative-method", "heads")
    *_, source = load_sources(settings_for(*flags), target, layer, room)
    assert isinstance(source.drafter, EagleDrafter)
    slabs = source.drafter.kv
    assert slabs.keys.nbytes + slabs.values.nbytes == num_slabs * of_one
    reads = ForDrafts("match", True, source.feature_layers, source.feature_window)
    assert reads.feature_window == WINDOW and len(reads.feature_layers) == 3
    rounds = round_bytes(settings_for(), target, reads, 4)
    rounds += recorded_round_bytes(target, 3 * int(target.config.hidden_size), num_slabs)
    assert beside(*flags).kept_bytes(room) == num_slabs * of_one + held(reads, target) + rounds


def llama_8b() -> LoadedModel:
    """No more of it than is asked for here."""
    config = SimpleNamespace(hidden_size=4096, intermediate_size=14336)
    return replace(load_tiny("llama"), config=config, vocab_size=128256, dtype=torch.bfloat16)


def test_what_a_round_is_computed_in_is_told_by_its_rows_and_what_it_draws() -> None:
    """Of Llama 8B's 256 seats about 0.6 GB for an EAGLE-3 layer, 0.8 for a whole layer."""
    settings, target, window = settings_for(), llama_8b(), 512
    three = ForDrafts("match", True, (2, 16, 29), window)
    drawn = 256 * 128256 * (2 + 8) + (40 << 22)
    assert round_bytes(settings, target, three, 256) == 4096 * 3 * 4096 * 2 + drawn
    assert round_bytes(settings, target, three, 32) == 4096 * (3 + 10) * 4096 * 2, (
        "the same rows, fewer logits"
    )
    assert round_bytes(settings, target, three, 1) == 512 * 3 * 4096 * 2 + 128256 * 10 + (40 << 22), (
        "a window of rows"
    )
    whole = ForDrafts("match", True, (31,), window)
    assert round_bytes(settings, target, whole, 256) == 4096 * (4096 + 5 * 4096 + 8 * 4096 + 3 * 14336) * 2
    assert round_bytes(settings, target, ForDrafts(), 256) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_module_keeps_what_its_slabs_take(family: str, tmp_path: Path) -> None:
    """Though its layer is known by those of the target alone."""
    directory = TinyMtp(family).save(tmp_path)
    target = load_model(directory, load_settings([str(directory)], environ=WITHOUT_KERNELS).model)
    layout = find_mtp(directory, target.config)
    assert layout is not None
    drafter = load_mtp_drafter(directory, target, layout, eagle_room(ROOMS[0]))
    slabs, reads = drafter.kv, ForDrafts("match", True, drafter.feature_layers, drafter.kv.window)
    told = beside("--speculative-method", "mtp", target=target, directory=directory)
    in_slabs = sum(tensor.nbytes for tensor in slabs.tensors.tensors)
    rounds = round_bytes(settings_for(), target, reads, 4)
    rounds += recorded_round_bytes(target, int(target.config.hidden_size), slabs.tensors.num_blocks)
    assert told.kept_bytes(ROOMS[0]) == in_slabs + held(reads, target) + rounds > in_slabs + rounds > 0


def test_all_that_draft_keep_something(draft: Path, layer: Path) -> None:
    both = beside("--draft-model", str(draft), "--draft-heads", str(layer))
    apart = (beside("--draft-model", str(draft)), beside("--draft-heads", str(layer)))
    assert both.kept_bytes(ROOMS[1]) == sum(each.kept_bytes(ROOMS[1]) for each in apart)


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_an_embedding_model_counts_in_the_dtype_it_is_loaded_in(
    dtype: str, width: int, tmp_path: Path
) -> None:
    directory = save_embedder(tmp_path, heads=("Dense", "Dense", "Normalize"))
    numbers = sum(each.numel() for each in make_model("bert").parameters())
    behind = 2 * 4 * (16 * 32 + 16)  # which compute in float32
    computed = 1024 * (8 * 32 + 3 * 48) * width  # of a batch
    found = beside("--embedding-model", str(directory), "--dtype", dtype)
    assert found == MemoryBeside(embeddings=numbers * width + behind + computed)
    assert found.total == found.embeddings


def test_a_text_that_is_longer_than_a_batch_is_what_an_embedding_model_computes_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flags = ("--embedding-model", str(save_embedder(tmp_path)))
    whole = beside(*flags).embeddings
    monkeypatch.setattr(memory_beside, "BATCH_TOKENS", 1)
    assert whole - beside(*flags).embeddings == (1024 - MAX_TOKENS) * (8 * 32 + 3 * 48) * 4


def test_what_cannot_be_told_counts_as_nothing(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    for flag in ("--draft-model", "--draft-heads", "--medusa-heads", "--embedding-model"):
        assert beside(flag, nowhere) == MemoryBeside()


def test_a_start_and_the_doctor_size_with_what_comes_and_measure_with_what_is_still_to_come(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = MemoryBeside(drafts=3, embeddings=5, kept=(lambda room: room.max_num_seqs,))
    asked: list[tuple[str, object]] = []

    def foresee(settings: Settings, target: LoadedModel, directory: Path | None, **may: bool) -> MemoryBeside:
        assert directory == Path(settings.model.model)
        asked.append(("beside", may.get("may_fetch", True)))
        return told

    def foresee_room(*args: Any, **more: Any) -> kv_room.KvRoom:
        asked.append(("foreseen", args[3]))
        return kv_room.foresee_kv_room(*args, **more)

    def measure_room(*args: Any) -> kv_room.KvRoom:
        asked.append(("measured", args[5](4)))
        return kv_room.measure_kv_room(*args)

    for room in ("build", "doctor"):
        monkeypatch.setattr(f"engine.startup.{room}.foresee_memory_beside", foresee)
        monkeypatch.setattr(f"engine.startup.{room}.foresee_kv_room", foresee_room)
    monkeypatch.setattr(build, "measure_kv_room", measure_room)
    model = save_tiny_model("llama", tmp_path)
    settings = load_settings([str(model), "--kv-cache-memory", "1MiB", "--swap-space", "64KiB"], {})
    assert diagnose(settings).problems == []
    assert asked == [("beside", False), ("foreseen", told)]
    asked.clear()
    load_parts(settings)
    assert asked == [("beside", True), ("foreseen", told), ("measured", 5)]


def test_a_start_sets_aside_what_sequences_will_hold_for_the_drafter_that_it_has_loaded(
    monkeypatch: pytest.MonkeyPatch, layer: Path, tmp_path: Path
) -> None:
    """By the seats, of which there may be fewer in the end; its slabs are there by then."""
    asked: list[Any] = []

    def measure_room(*args: Any) -> kv_room.KvRoom:
        asked.append(args[5])
        return kv_room.measure_kv_room(*args)

    monkeypatch.setattr(build, "measure_kv_room", measure_room)
    model = str(save_tiny_model("llama", tmp_path))
    flags = (model, "--kv-cache-memory", "1MiB", "--dtype", "float32", "--num-speculative-tokens", "5")
    target = load_tiny("llama")
    reads = ForDrafts("match", True, (0, 1, 1), WINDOW)
    cases: list[tuple[tuple[str, ...], Callable[[int], int]]] = [
        ((), lambda _: 0),
        (
            ("--draft-heads", str(layer)),
            lambda seats: (
                reads.held_bytes(target, seats, 5) + round_bytes(settings_for(), target, reads, seats)
            ),
        ),
        (("--draft-model", model), lambda _: 0),
        (
            ("--draft-model", model, "--draft-verification", "rejection"),
            lambda seats: seats * 11 * target.vocab_size * 4,
        ),
    ]
    for more, expected in cases:
        load_parts(load_settings([*flags, *more], WITHOUT_KERNELS))
        assert [asked[-1](seats) for seats in (1, 7)] == [expected(1), expected(7)], more


def test_the_doctor_tells_what_is_set_aside_for_features_on_a_gpu_alone(layer: Path) -> None:
    target, settings = load_tiny("llama"), settings_for("--draft-heads", str(layer), "--max-num-seqs", "4")
    found = {}
    for loaded in (target, on_gpu(target)):
        room = kv_room.foresee_kv_room(settings, loaded, None)
        facts = DraftFacts(("heads",))
        _weigh_reader(facts, settings, room, FoundModel("here", layer))
        found[loaded.device.type] = facts.reader_held_bytes, facts.reader_work_bytes
    reads = ForDrafts("match", True, (0, 1, 1), WINDOW)
    assert found == {"cpu": (0, 0), "cuda": (held(reads, target), round_bytes(settings, target, reads, 4))}


def test_the_doctor_tells_what_steps_of_a_gpu_are_computed_in_and_recorded_to() -> None:
    settings = settings_for("--max-num-seqs", "4")
    for loaded, is_gpu in ((load_tiny("llama"), False), (on_gpu(load_tiny("llama")), True)):
        room, found = kv_room.foresee_kv_room(settings, loaded, None), Diagnosis()
        _examine_cache(found, settings, room)
        needs = ModelNeeds.of(settings, loaded)
        work = needs.work(room.sizes) + recorded_bytes(settings, loaded, room.sizes)
        assert found.work_bytes == (work if is_gpu else 0)
        found.drafts = DraftFacts(("heads",), reader_work_bytes=3)
        assert found.work_bytes == (work + 3 if is_gpu else 3)
