"""Which draft models are taken, how much KV they get, and what is said of the others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

from config import ModelSettings, Settings
from config.schema import SpeculationSettings
from engine.compute.attention.kv_tensors import bytes_per_block
from engine.compute.cuda.device_draw import TORCH_DRAWS
from engine.compute.drafters import draft_loader
from engine.compute.drafters.draft_loader import (
    AUTO_LANES,
    TargetRoom,
    check_vocabulary,
    count_draft_blocks,
    load_draft_model,
    num_lanes,
    on_device,
)
from engine.compute.drafters.draft_model import DraftSizes
from engine.errors import StartRefused
from engine.plan.request import SamplingParams
from engine.plan.speculation.drafter import DraftJob, DraftRequest
from tests.support.packed import load_tiny
from tests.support.tiny_models import MAX_POSITIONS, VOCAB_SIZE, save_tiny_model, tiny_tokenizer

ROOM = TargetRoom(max_num_seqs=64, block_size=16, kv_bytes=2**24)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("target"))


def settings_for(draft: Path, **model: Any) -> Settings:
    return Settings(
        model=ModelSettings(model="the target", device="cpu", **model),
        speculation=SpeculationSettings(draft_model=str(draft)),
    )


def test_a_directory_becomes_a_drafter(target: Path) -> None:
    drafter = load_draft_model(settings_for(target), load_tiny("llama"), target, ROOM)
    request = DraftRequest("a", 3, SamplingParams(max_tokens=9, temperature=0.0))
    (draft,) = drafter.draft([DraftJob(request, 0, 0, (5, 6, 7), 3, 1)]).drafts
    assert len(draft.token_ids) == 1
    drafter.close(["a"])
    assert drafter.num_used_blocks == 0


def test_its_layers_are_fused_as_the_targets_are(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, where that is; what is drafted with is what was made of the model then."""
    fused, asked = load_tiny("llama"), list[Any]()

    def fuse(loaded: Any, settings: Any, block_size: int, reload: Any) -> Any:
        asked.append((settings.compile, block_size, reload().model.num_parameters()))
        return fused

    monkeypatch.setattr(draft_loader, "with_fast_layers", fuse)
    drafter = load_draft_model(settings_for(target, compile="off"), load_tiny("llama"), target, ROOM)
    assert asked == [("off", ROOM.block_size, fused.model.num_parameters())]
    assert drafter._forward.loaded is fused


def test_the_targets_longer_or_shorter_context_is_no_obstacle(target: Path) -> None:
    for max_model_len in (64, 4 * MAX_POSITIONS):
        loaded = replace(load_tiny("llama"), max_model_len=max_model_len)
        load_draft_model(settings_for(target, max_model_len=max_model_len), loaded, target, ROOM)


def changed_tokenizer(directory: Path, change: Any) -> Path:
    tiny_tokenizer().save_pretrained(directory)
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return directory


def test_the_same_vocabulary_may_come_with_other_settings(target: Path, tmp_path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["truncation"] = None
        content["pre_tokenizer"]["add_prefix_space"] = True

    check_vocabulary(target, changed_tokenizer(tmp_path, change))


def test_the_first_token_that_differs_is_named(target: Path, tmp_path: Path) -> None:
    def swap(content: dict[str, Any]) -> None:
        vocab = content["model"]["vocab"]
        names = {token_id: token for token, token_id in vocab.items()}
        vocab[names[40]], vocab[names[60]] = 60, 40

    with pytest.raises(StartRefused, match=r"another vocabulary than the target: token 40 is '.', .* is '.'"):
        check_vocabulary(target, changed_tokenizer(tmp_path / "a", swap))

    def add(content: dict[str, Any]) -> None:
        content["added_tokens"].append(content["added_tokens"][0] | {"id": VOCAB_SIZE, "content": "<tool>"})

    with pytest.raises(StartRefused, match=rf"token {VOCAB_SIZE} is '<tool>', the target's is missing\."):
        check_vocabulary(target, changed_tokenizer(tmp_path / "b", add))
    (tmp_path / "a" / "tokenizer.json").write_text("{")
    with pytest.raises(StartRefused, match=r"tokenizer\.json cannot be read"):
        check_vocabulary(target, tmp_path / "a")


def test_a_recurrent_draft_model_is_refused(target: Path, tmp_path: Path) -> None:
    config = MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=1)
    MambaForCausalLM(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(StartRefused, match="MambaForCausalLM cannot"):
        load_draft_model(settings_for(tmp_path), load_tiny("llama"), target, ROOM)


def test_kv_is_what_all_sequences_may_need_or_what_the_memory_holds_but_never_less_than_one() -> None:
    loaded = load_tiny("llama")
    block_bytes = bytes_per_block(loaded.layers, 16, torch.float32)
    longest = MAX_POSITIONS // 16
    assert count_draft_blocks(loaded, 16, 4, 2**40) == 4 * longest
    assert count_draft_blocks(loaded, 16, 4, 40 * block_bytes + 1) == 40
    assert count_draft_blocks(loaded, 16, 4, 0) == longest


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, AUTO_LANES),
        ({"speculation_schedule": "async"}, 0),
        ({"speculation_schedule": "async", "draft_lanes": 3}, 3),
        ({"speculation_schedule": "auto", "draft_lanes": 0}, 0),
        ({"speculation_schedule": "sync"}, 0),
    ],
)
def test_lanes_are_tried_where_the_schedule_is_measured_or_kept_where_asked_for(
    settings: dict[str, Any], expected: int
) -> None:
    assert num_lanes(SpeculationSettings(**settings), torch.device("cpu")) == expected


def test_on_a_gpu_there_are_no_lanes_and_who_asks_for_some_is_told() -> None:
    gpu = torch.device("cuda", 0)
    assert num_lanes(SpeculationSettings(), gpu) == 0
    with pytest.raises(StartRefused, match=r"--draft-lanes 2: .*Add --draft-device cpu"):
        num_lanes(SpeculationSettings(draft_lanes=2), gpu)


def test_a_gpu_draws_drafts_as_fast_as_it_draws_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """By whole sorts and passes in float64 a draft took longer to draw than to compute."""
    asked: list[torch.device] = []
    given: list[object] = []
    fast = TORCH_DRAWS._replace()

    def choose_draws(device: torch.device) -> object:
        asked.append(device)
        return fast

    class Runner:
        def __init__(self, *parts: object) -> None:
            given.extend(parts)

        def warm_up(self) -> None: ...

    for name in ("ModelRunner", "Sampler", "CudaRecorder", "own_stream"):
        monkeypatch.setattr(draft_loader, name, lambda *_: None)
    monkeypatch.setattr(draft_loader, "CudaRunner", Runner)
    monkeypatch.setattr(draft_loader, "choose_draws", choose_draws, raising=False)
    device = torch.device("cuda", 1)
    sizes = DraftSizes(VOCAB_SIZE, num_blocks=8, block_size=16, max_num_seqs=4)
    assert on_device(replace(load_tiny("llama"), device=device), sizes) is not None
    assert any(part is fast for part in given)
    assert asked == [device]
