"""MTP modules: what a plain pass over their published weights gives, whatever family, in whatever pieces."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from config import load_settings
from engine.compute.attention import ReferenceAttention
from engine.compute.drafters import eagle, eagle_loader
from engine.compute.drafters.eagle import EagleDrafter
from engine.compute.drafters.eagle_loader import EagleRoom, make_kv
from engine.compute.drafters.mtp_layer import MtpLayer
from engine.compute.drafters.mtp_layouts import find_mtp
from engine.compute.drafters.mtp_loader import load_mtp_drafter
from engine.compute.drafters.mtp_module import MtpModule, load_mtp_module
from engine.compute.drafters.slab_rows import RowsApart, RowsTogether, SlabRows, Span
from engine.compute.loading.loader import LoadedModel, load_model
from engine.compute.native.decoder import DecoderOutput
from engine.compute.runner.prompt_scorer import PromptScorer
from engine.errors import StartRefused
from engine.plan.request import SamplingParams
from engine.plan.speculation.drafter import DraftJob, DraftRequest, TargetFeatures
from engine.plan.step_records import PromptRows
from engine.startup.build_speculation import find_module
from tests.support.native import WITHOUT_KERNELS
from tests.support.packed import load_tiny
from tests.support.quantized_checkpoints import fp8
from tests.support.tiny_mtp import FAMILIES, WINDOWLESS, TinyMtp

Weights = dict[str, torch.Tensor]
WEIGHTS_FILE = "model.safetensors"
ROOM = EagleRoom(max_num_seqs=3, kv_bytes=1 << 26)
TOKENS = torch.randint(3, 512, (WINDOWLESS,), generator=torch.Generator().manual_seed(5)).tolist()


def load(directory: Path, *flags: str) -> LoadedModel:
    settings = load_settings([str(directory), "--dtype", "float32", *flags], environ=WITHOUT_KERNELS)
    return load_model(directory, settings.model)


class Case:
    """A tiny target on disk and in memory, and what its module should give."""

    def __init__(self, family: str, directory: Path) -> None:
        self.tiny = TinyMtp(family)
        self.directory = self.tiny.save(directory)
        self.target = load(directory)
        with torch.inference_mode():
            self.features = self.tiny.features(TOKENS)

    def module(self) -> MtpModule:
        layout = find_mtp(self.directory, self.target.config)
        assert layout is not None
        return load_mtp_module(self.directory, self.target, layout)

    def drafter(self) -> EagleDrafter:
        layout = find_mtp(self.directory, self.target.config)
        assert layout is not None
        return load_mtp_drafter(self.directory, self.target, layout, ROOM)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param) / "model")


@pytest.mark.parametrize("way", [RowsApart, partial(RowsTogether, ReferenceAttention())])
@torch.inference_mode()
def test_logits_are_those_of_a_plain_pass(way: Callable[..., SlabRows], case: Case) -> None:
    module, tiny = case.module(), case.tiny
    layer, lay_out = MtpLayer(module), partial(way, make_kv(module.layer, 64, module.weight, ROOM))
    count = WINDOWLESS - 1
    expected = tiny.forward(tiny.read(case.features[:-1]), TOKENS[1:])
    stops = (7, 8, 20, count)
    last = [stop - 1 for stop in stops]
    found, first = [], 0
    for stop in stops:
        hidden = layer.read(case.features[first:stop])
        rows = lay_out([Span(1, first, stop - first)], range(first, stop))
        tokens = torch.tensor(TOKENS[first + 1 : stop + 1])
        found.append(layer.compute(hidden, tokens, rows))
        first = stop
    torch.testing.assert_close(torch.cat(found), expected[last], rtol=1e-3, atol=1e-4)
    logits = layer.logits(torch.cat(found))
    torch.testing.assert_close(logits, tiny.logits(expected[last]), rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_it_drafts_while_the_target_s_thread_scores_a_prompt(case: Case) -> None:
    """The target has no embedding then: its head is called with what its base model gave before."""
    module, scorer = case.module(), PromptScorer(case.target)
    layer, kv = MtpLayer(module), make_kv(module.layer, 64, module.weight, ROOM)
    hidden, tokens = layer.read(case.features[:4]), torch.tensor(TOKENS[1:5])
    left: list[torch.Tensor] = []

    def draft(*_: object) -> None:
        left.append(layer.compute(hidden, tokens, RowsApart(kv, [Span(1, 0, 4)], range(4))))

    draft()
    rows = PromptRows(
        np.zeros(1, np.int32), np.zeros(1, np.int64), np.full(1, TOKENS[1]), np.zeros(1, np.int32)
    )
    output = DecoderOutput(case.features[None])
    handle = case.target.model.get_output_embeddings().register_forward_pre_hook(draft)
    try:
        (record,) = scorer.score(rows, [output])
    finally:
        handle.remove()
    assert record is not None and record.token_id == TOKENS[1]
    assert len(left) == 2 and torch.equal(*left)


def test_what_it_shares_with_the_target_is_not_kept_twice(case: Case) -> None:
    names = {name.split(".")[0] for name, _ in case.module().named_parameters()}
    assert not names & {"_own_embedding", "_own_head"}


def test_drafts_are_the_likeliest_chain(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """On its own output, past refused drafts, beside another sequence."""
    for module in (eagle, eagle_loader):
        monkeypatch.setattr(module, "LEAST_CHANCE", 0.0)
    drafter = case.drafter()
    assert (drafter.method, drafter.feature_layers) == ("mtp", (2,))
    told = 0
    request = DraftRequest("a", 4, SamplingParams(max_tokens=99, temperature=0.0))
    other = DraftRequest("b", 4, SamplingParams(max_tokens=99, temperature=0.0))
    for known in (9, 10, 14, 30):
        run = TargetFeatures(known - 1, case.features[max(told - 1, 0) : known - 1])
        job = DraftJob(request, 0, told, tuple(TOKENS[told:known]), known, 4, (run,))
        jobs = [job]
        if not told:
            jobs.append(
                DraftJob(other, 0, 0, tuple(TOKENS[:5]), 5, 2, (TargetFeatures(4, case.features[:4]),))
            )
        draft = drafter.draft(jobs).drafts[0]
        assert (draft.parents is None) is case.target.keeps_state, "states are cut back along chains only"
        chain = list(draft.token_ids) if draft.parents is None else likeliest(draft.token_ids, draft.parents)
        expected = case.tiny.chain(case.features[: known - 1], TOKENS[:known], 4)
        assert chain and chain == expected[: len(chain)], known
        told = known


def likeliest(token_ids: tuple[int, ...], parents: tuple[int, ...]) -> list[int]:
    chain: list[int] = []
    above = -1
    while above in parents:
        above = parents.index(above)
        chain.append(token_ids[above])
    return chain


def refusal(tmp_path: Path, change: Callable[[str, Weights], object], family: str = "glm4_moe") -> str:
    """What loading says of a module whose tensors, behind their prefix, were changed."""
    tiny = TinyMtp(family)
    directory = tiny.save(tmp_path / "model")
    weights = load_file(directory / WEIGHTS_FILE)
    prefix = FAMILIES[family].prefix.format(n=tiny.num_layers)
    change(prefix, weights)
    save_file(weights, directory / WEIGHTS_FILE, {"format": "pt"})
    target = load(directory)
    layout = find_mtp(directory, target.config)
    assert layout is not None
    with pytest.raises(StartRefused) as caught:
        load_mtp_module(directory, target, layout)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("enorm.weight", None, "model.layers.2.enorm.weight is missing"),
        ("eh_proj.weight", torch.zeros(64, 64), "eh_proj.weight is [64, 64], expected [64, 128]"),
        ("self_attn.q_proj.weight", None, "missing_keys"),
        ("self_attn.spare.weight", torch.zeros(1), "unexpected_keys"),
        ("shared_head.norm.weight", None, "missing_keys model.norm.weight"),
        ("hnorm.weight", torch.full((64,), torch.nan), "NaN"),
        ("embed_tokens.weight", torch.zeros(8, 64), "embed_tokens.weight is [8, 64], expected [512, 64]"),
    ],
)
def test_a_module_that_does_not_fit_is_refused(
    name: str, tensor: torch.Tensor | None, reason: str, tmp_path: Path
) -> None:
    def change(prefix: str, weights: Weights) -> None:
        weights.pop(prefix + name, None)
        if tensor is not None:
            weights[prefix + name] = tensor

    assert reason in refusal(tmp_path, change)


def test_embeddings_of_its_own_are_used(tmp_path: Path) -> None:
    tiny = TinyMtp("glm4_moe")
    directory = tiny.save(tmp_path / "model")
    weights = load_file(directory / WEIGHTS_FILE)
    weights["model.layers.2.shared_head.head.weight"] *= 2
    save_file(weights, directory / WEIGHTS_FILE, {"format": "pt"})
    target = load(directory)
    layout = find_mtp(directory, target.config)
    assert layout is not None
    module = load_mtp_module(directory, target, layout)
    last = torch.randn(3, 64)
    torch.testing.assert_close(module.logits(last), 2 * tiny.logits(last))


def test_a_quantized_module_is_unpacked(tmp_path: Path) -> None:
    """As DeepSeek publishes it: what multiplies in 8 bits, with scales for blocks."""
    plain = TinyMtp("deepseek_v3").save(tmp_path / "plain")
    weights = load_file(plain / WEIGHTS_FILE)
    stored, checkpoint = dict(weights), fp8((24, 32))
    draw = torch.Generator().manual_seed(0)
    for name, tensor in weights.items():
        if "proj" in name and tensor.ndim == 2:
            made = checkpoint.store(tensor.shape[0], tensor.shape[1], draw)
            prefix = name.removesuffix("weight")
            stored |= {f"{prefix}{ending}": part.contiguous() for ending, part in made.tensors.items()}
            weights[name] = made.numbers
    save_file(weights, plain / WEIGHTS_FILE, {"format": "pt"})
    quantized = Path(shutil.copytree(plain, tmp_path / "quantized"))
    save_file(stored, quantized / WEIGHTS_FILE, {"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = checkpoint.settings
    (quantized / "config.json").write_text(json.dumps(config))
    found = []
    for directory in (plain, quantized):
        target = load(directory)
        layout = find_mtp(directory, target.config)
        assert layout is not None
        found.append(load_mtp_module(directory, target, layout).state_dict())
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_models_without_one_have_none(tmp_path: Path) -> None:
    tiny = TinyMtp("glm4_moe")
    directory = tiny.save(tmp_path / "model")
    weights = load_file(directory / WEIGHTS_FILE)
    target = load(directory)
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith("model.layers.2.")}
    save_file(kept, directory / WEIGHTS_FILE, {"format": "pt"})
    assert find_mtp(directory, target.config) is None
    assert find_mtp(directory, load_tiny("llama").config) is None
    speculation = load_settings(["--speculative-method", "mtp"], environ={}).speculation
    with pytest.raises(StartRefused, match="have no MTP module that is known"):
        find_module(speculation, target, directory)
