"""Training Medusa heads for a tiny model, from prompts to a report, and what happens when it is cut short."""

from __future__ import annotations

import asyncio
import json
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from config import load_settings
from engine.compute.drafters.draft_tree import DraftTree, default_tree
from engine.compute.drafters.medusa import MedusaDrafter
from engine.compute.drafters.medusa_heads import MedusaHeads, load_medusa_heads
from engine.compute.loading.loader import LoadedModel, load_model
from engine.errors import StartRefused
from engine.loop.engine import Engine
from engine.plan.request import GenerationRequest, SamplingParams
from engine.plan.speculation.drafter import DraftJob, DraftRequest, TargetFeatures
from engine.startup.build import load_parts
from engine.training.fitting import FitOptions, frequent_token_ids
from engine.training.medusa_evaluation import evaluate_heads, walk
from engine.training.medusa_run import train_medusa_heads
from engine.training.medusa_training import fit_heads
from engine.training.sample_generator import SampleGenerator, SampleSizes
from engine.training.samples import Positions, Sample, SampleStore
from engine.training.training_plan import MedusaPlan
from tests.support.engines import collect
from tests.support.native import WITHOUT_KERNELS
from tests.support.packed import as_loaded, load_tiny, plain_logits
from tests.support.tiny_models import save_tiny_model, tiny_model


@dataclass
class Watch:
    """Progress that remembers its stages, and stops in one of them if told so."""

    stop_in: str = ""
    stages: list[str] = field(default_factory=list)
    stopped: bool = False

    def update(self, stage: str, done: float, total: float, note: str) -> None:
        assert total > 0
        if stage not in self.stages:
            self.stages.append(stage)
        self.stopped = self.stopped or stage == self.stop_in

    def is_stopped(self) -> bool:
        return self.stopped


PROMPTS = [list(range(start, start + 6)) for start in range(10, 50, 2)]


def generate(target: LoadedModel, num_samples: int, batch_size: int = 8) -> list[Sample]:
    generator = SampleGenerator(target, PROMPTS, sizes=SampleSizes(batch_size, 40), seed=0, keeps_hidden=True)
    samples: list[Sample] = []
    for finished in generator.steps(set()):
        samples += finished
        if len(samples) >= num_samples:
            return samples
    raise AssertionError


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_hidden_state_is_what_its_token_was_drawn_from(family: str) -> None:
    target = load_tiny(family)
    samples = generate(target, 12)
    assert {sample.temperature > 0 for sample in samples} == {True, False}
    for sample in samples[:6]:
        prompt = PROMPTS[sample.number % len(PROMPTS)]
        assert sample.first_position == len(prompt)
        tokens = [*prompt, *sample.token_ids.tolist()]
        logits = plain_logits(target, tokens)[len(prompt) - 1 : -1]
        projected = target.model.get_output_embeddings()(sample.hidden)
        if family == "gemma2":  # its logits are capped after the projection
            projected = torch.tanh(projected / 20.0) * 20.0
        torch.testing.assert_close(projected, logits, rtol=1e-3, atol=1e-3)
        if sample.temperature == 0:
            assert logits.argmax(-1).tolist() == sample.token_ids.tolist()


def test_samples_are_the_same_whatever_runs_beside_them() -> None:
    target = load_tiny("llama")
    by_number = {sample.number: sample for sample in generate(target, 20, batch_size=8)}
    alone = generate(target, 3, batch_size=1)
    for sample in alone:
        assert by_number[sample.number].token_ids.tolist() == sample.token_ids.tolist()


def test_shards_keep_samples_and_belong_to_one_run(tmp_path: Path) -> None:
    samples = generate(load_tiny("llama"), 10)
    store = SampleStore(tmp_path, "one")
    store.append(samples[:6])
    store.append(samples[6:])
    read = list(SampleStore(tmp_path, "one").read())
    assert len(read) == len(samples)
    for before, after in zip(samples, read, strict=True):
        assert (before.number, before.seed, before.temperature, before.first_position) == (
            after.number,
            after.seed,
            after.temperature,
            after.first_position,
        )
        torch.testing.assert_close(before.hidden, after.hidden, rtol=0, atol=0)
    with pytest.raises(StartRefused, match="another model, seed or set of prompts"):
        list(SampleStore(tmp_path, "two").read())
    with pytest.raises(StartRefused, match="cannot be written"):
        SampleStore(Path("/dev/null"), "one").append(samples)
    (tmp_path / "samples-00000.safetensors").unlink()
    rest = SampleStore(tmp_path, "one")
    rest.append(samples[:6])
    assert [sample.number for sample in SampleStore(tmp_path, "one").read()] == [
        *(sample.number for sample in samples[6:]),
        *(sample.number for sample in samples[:6]),
    ]
    shard = tmp_path / "samples-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(StartRefused, match="damaged"):
        list(SampleStore(tmp_path, "one").read())


def cycle_samples(target: LoadedModel, num_samples: int) -> list[Sample]:
    """Sequences that go round in a circle of twelve tokens, from states near the token's own embedding."""
    generator = torch.Generator().manual_seed(0)
    embedding = target.model.get_output_embeddings().weight.detach()
    samples = []
    for number in range(num_samples):
        tokens = [(number + place) % 12 for place in range(30)]
        hidden = 4 * embedding[tokens] + 0.2 * torch.randn(30, 64, generator=generator)
        temperature = 0.0 if number % 2 else 1.0
        samples.append(
            Sample(number, 5, number, temperature, torch.tensor(tokens, dtype=torch.int32), hidden)
        )
    return samples


def test_training_lowers_the_loss_and_beats_untrained_heads() -> None:
    target = load_tiny("llama")
    train, judged = (Positions(samples) for samples in np.split(np.array(cycle_samples(target, 120)), [100]))
    token_ids = frequent_token_ids(train.token_ids, target.vocab_size, 64)
    assert set(token_ids[:12].tolist()) == set(range(12))
    heads = MedusaHeads(target, 3, token_ids, default_tree(3))
    before = evaluate_heads(heads, judged, Watch())
    result = fit_heads(heads, train, FitOptions(num_epochs=60), Watch())
    assert not result.was_stopped
    for first, last in zip(result.first_losses, result.last_losses, strict=True):
        assert last < 0.5 * first
    after = evaluate_heads(heads, judged, Watch())
    assert after.coverage == 1.0
    assert before.tokens_per_step["greedy"]["chain"] < 1.5
    assert after.tokens_per_step["greedy"]["chain"] > 3.0  # of four
    assert after.accuracy["greedy"][2][0] > 0.9


def test_equal_seeds_give_equal_heads() -> None:
    target = load_tiny("llama")
    positions = Positions(cycle_samples(target, 40))
    found = []
    for seed in (0, 0, 1):
        heads = MedusaHeads(target, 2, torch.arange(32), default_tree(2))
        fit_heads(heads, positions, FitOptions(num_epochs=2, seed=seed), Watch())
        found.append(heads.state_dict()["heads.1.linear.weight"])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_tokens_that_heads_cannot_guess_teach_nothing() -> None:
    target = load_tiny("llama")
    positions = Positions(cycle_samples(target, 20))
    heads = MedusaHeads(target, 2, torch.arange(400, 500), default_tree(2))
    before = {name: value.clone() for name, value in heads.state_dict().items()}
    result = fit_heads(heads, positions, FitOptions(num_epochs=1), Watch())
    assert result.last_losses == (0.0, 0.0)
    torch.testing.assert_close(heads.state_dict(), before, rtol=0, atol=0)
    found = evaluate_heads(heads, positions, Watch())
    assert found.coverage == 0.0
    assert set(found.tokens_per_step["greedy"].values()) == {1.0}


def test_what_is_reported_is_what_the_drafter_proposes() -> None:
    """Decode samples over with the drafter's own answers: as many tokens a step as the report says."""
    target = load_tiny("llama")
    samples = generate(target, 40)
    positions = Positions(samples)
    heads = MedusaHeads(target, 2, torch.arange(256), DraftTree.chain(2))
    for parameter in heads.heads.parameters():
        parameter.data.normal_(std=0.02)
    found = evaluate_heads(heads, positions, Watch())
    drafter = MedusaDrafter(heads, found.tree)
    for kind, is_greedy in (("greedy", True), ("sampled", False)):
        mine = [s for s in samples[1::2] if (s.temperature == 0) is is_greedy]
        accepted = [np.array([accepted_drafts(drafter, s, i) for i in range(len(s.token_ids))]) for s in mine]
        rate = found.tokens_per_step[kind][str(len(found.tree.parents))] if mine else None
        assert mine
        assert walk(accepted) == pytest.approx(rate, rel=0.02)


def accepted_drafts(drafter: MedusaDrafter, sample: Sample, row: int) -> int:
    """Follow the drafter's tree along the tokens that really came."""
    assert sample.hidden is not None
    position = sample.first_position + row
    params = SamplingParams(max_tokens=9, temperature=sample.temperature, seed=sample.seed)
    job = DraftJob(
        request=DraftRequest("a", sample.first_position, params),
        epoch=0,
        first=0,
        token_ids=(0,) * (position + 1),
        num_committed=position + 1,
        num_wanted=32,
        features=(TargetFeatures(position, sample.hidden[row : row + 1]),),
    )
    (answer,) = drafter.draft([job]).drafts
    parents = answer.parents or tuple(range(-1, len(answer.token_ids) - 1))
    node, count = -1, 0
    for token_id in sample.token_ids[row + 1 :].tolist():
        children = [i for i, parent in enumerate(parents) if parent == node]
        node = next((i for i in children if answer.token_ids[i] == token_id), -2)
        if node < 0:
            break
        count += 1
    return count


@pytest.mark.parametrize(("num_accepted", "rate"), [(0, 1.0), (1, 9 / 5), (3, 9 / 3), (20, 9.0)])
def test_tokens_a_step_of_a_whole_sequence(num_accepted: int, rate: float) -> None:
    # Nine tokens follow the first one; a step commits the drafts it accepts and one more.
    assert walk([np.full(10, num_accepted)]) == rate
    assert walk([np.full(1, num_accepted)]) == 0.0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_model("llama", tmp_path / "model")


def make_plan(output: Path) -> MedusaPlan:
    prompts = output.parent / "prompts"
    prompts.write_text("".join(f"Count to {number}.\n" for number in range(90)))
    return MedusaPlan(
        output=output,
        prompts=prompts,
        num_tokens=1500,
        num_heads=2,
        num_token_ids=256,
        num_epochs=3,
        max_new_tokens=24,
        batch_size=16,
        seed=0,
        threads=1,
    )


def test_the_whole_run_leaves_heads_that_load_and_a_report(model: Path, tmp_path: Path) -> None:
    settings = load_settings([str(model), "--dtype", "float32"], WITHOUT_KERNELS)
    plan = make_plan(tmp_path / "out")
    watch = Watch()
    report = train_medusa_heads(settings, plan, watch)
    assert watch.stages == ["generate", "evaluate", "train"]
    assert report is not None
    assert json.loads((plan.output / "report.json").read_text()) == report
    assert report["num_train_tokens"] + report["num_judged_tokens"] >= 1500
    target = load_model(model, settings.model)
    heads = load_medusa_heads(plan.output, target)
    assert heads.num_heads == 2
    assert [list(path) for path in heads.tree.paths] == report["tree_paths"]
    # Once more with the samples there are: nothing is generated, and the heads are the same.
    watch = Watch()
    train_medusa_heads(settings, plan, watch)
    assert "generate" not in watch.stages
    torch.testing.assert_close(load_medusa_heads(plan.output, target).state_dict(), heads.state_dict())
    with pytest.raises(StartRefused, match="another model, seed or set of prompts"):
        train_medusa_heads(settings, replace(plan, seed=1), Watch())


def test_a_run_that_is_stopped_keeps_what_it_has(model: Path, tmp_path: Path) -> None:
    settings = load_settings([str(model), "--dtype", "float32"], WITHOUT_KERNELS)
    plan = make_plan(tmp_path / "out")
    assert train_medusa_heads(settings, plan, Watch(stop_in="generate")) is None
    assert not (plan.output / "config.json").exists()
    report = train_medusa_heads(settings, plan, Watch(stop_in="train"))
    assert report is not None
    assert report["training"]["num_steps"] == 1
    assert report["training"]["was_stopped"]
    load_medusa_heads(plan.output, load_model(model, settings.model))


@pytest.mark.slow
def test_a_run_of_few_minutes_ends_in_time_and_too_little_is_refused(model: Path, tmp_path: Path) -> None:
    settings = load_settings([str(model), "--dtype", "float32"], WITHOUT_KERNELS)
    plan = replace(make_plan(tmp_path / "out"), num_tokens=10**9, num_epochs=1000, minutes=0.05)
    report = train_medusa_heads(settings, plan, Watch())
    assert report is not None
    assert report["seconds"]["in all"] < 15
    with pytest.raises(StartRefused, match="too few to train on and judge by"):
        train_medusa_heads(settings, replace(make_plan(tmp_path / "other"), num_tokens=1), Watch())


def test_an_output_that_cannot_be_written_is_refused_before_the_model_talks(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path / "model")
    settings = load_settings([str(model), "--dtype", "float32"], WITHOUT_KERNELS)
    watch, place = Watch(), tmp_path / "model" / "config.json" / "out"
    with pytest.raises(StartRefused, match="cannot be written: Not a directory"):
        train_medusa_heads(settings, replace(make_plan(tmp_path / "out"), output=place), watch)
    assert not watch.stages


def test_a_model_whose_answers_all_fail_is_refused() -> None:
    target = as_loaded(deepcopy(tiny_model("llama")))
    for name, weights in target.model.named_parameters():
        if "mlp" in name:
            weights.data.fill_(torch.nan)
    with pytest.raises(StartRefused, match="its logits are not finite"):
        generate(target, 1)


def test_a_prompt_that_the_template_refuses_is_named(model: Path, tmp_path: Path) -> None:
    settings = load_settings([str(model), "--dtype", "float32"], WITHOUT_KERNELS)
    plan = make_plan(tmp_path / "out")
    assert plan.prompts is not None
    plan.prompts.write_text('Count.\n{"prompt": "half of a pair: \\ud800"}\n')
    with pytest.raises(StartRefused, match=r"prompt 2 cannot be used: .* lone surrogate"):
        train_medusa_heads(settings, plan, Watch())


async def test_the_engine_gives_the_same_tokens_with_heads(model: Path, tmp_path: Path) -> None:
    """Heads that were trained a little, and trees of their drafts, change nothing but the number of steps."""
    settings = load_settings([str(model), "--dtype", "float32"], WITHOUT_KERNELS)
    plan = make_plan(tmp_path / "out")
    assert train_medusa_heads(settings, plan, Watch()) is not None
    heads = ["--speculative-method", "medusa", "--medusa-heads", str(plan.output)]
    always = ["--draft-length-policy", "fixed", "--min-acceptance-rate", "0", "--num-kv-blocks", "256"]
    off = await generate_all(model, ["--speculative-method", "none", "--num-kv-blocks", "256"])
    on = await generate_all(model, [*heads, *always])
    assert on.tokens == off.tokens
    assert off.num_rounds == 0
    assert on.num_rounds > 50
    assert on.num_accepted > 0


@dataclass(frozen=True)
class Generated:
    """What an engine wrote for each request, and what drafting did meanwhile."""

    tokens: list[list[int]]
    num_rounds: int
    num_accepted: int


async def generate_all(model: Path, flags: list[str]) -> Generated:
    """Twelve requests at once, greedy and not, by the engine that these flags make."""
    settings = load_settings([str(model), "--dtype", "float32", *flags], WITHOUT_KERNELS)
    parts = load_parts(settings)
    torch.set_num_threads(1)
    engine = Engine(lambda: parts)
    await engine.start()
    try:
        streams = [
            engine.submit(
                GenerationRequest(
                    request_id=f"r{row}",
                    prompt_token_ids=PROMPTS[row],
                    sampling=SamplingParams(
                        max_tokens=32, temperature=(0.0, 0.7, 1.2)[row % 3], seed=row, ignore_eos=True
                    ),
                )
            )
            for row in range(12)
        ]
        collected = await asyncio.gather(*(collect(stream) for stream in streams))
        speculation = engine.metrics.speculation
        return Generated(
            [each.token_ids for each in collected], speculation.num_rounds, speculation.num_accepted
        )
    finally:
        await engine.stop()
