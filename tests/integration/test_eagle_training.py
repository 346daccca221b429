"""Training a drafter of one layer for a tiny model, from prompts to a report, and what a short run leaves."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from config import load_settings
from engine.compute.drafters.eagle_layer import EagleLayer, EagleShape, fresh_config, load_eagle_layer
from engine.compute.drafters.medusa import couple
from engine.compute.loading.loader import LoadedModel, load_model
from engine.errors import StartRefused
from engine.text.tokenizer import Tokenizer
from engine.training.eagle_chain import TrainedChain
from engine.training.eagle_evaluation import DEPTH, evaluate_layer, num_right
from engine.training.eagle_features import Example, FeatureReader, FeatureShards
from engine.training.eagle_run import train_drafter
from engine.training.eagle_training import (
    BATCH_TOKENS,
    Batch,
    Checkpoint,
    batches,
    fit_layer,
    losses,
    start_like_target,
)
from engine.training.fitting import FitOptions
from engine.training.own_prompts import OWN_PROMPTS_FILE, opening_of
from engine.training.samples import Sample
from engine.training.training_plan import DrafterPlan
from tests.support.native import WITHOUT_KERNELS
from tests.support.packed import load_tiny, plain_logits
from tests.support.tiny_models import save_tiny_model

LAYERS = (0, 1, 1)
WIDTH = 64  # of the tiny models


@dataclass
class Watch:
    """Progress that remembers its stages, and stops after so many updates of one of them if told so."""

    stop_in: str = ""
    stop_after: int = 1
    stages: list[str] = field(default_factory=list)

    def update(self, stage: str, done: float, total: float, note: str) -> None:
        assert total > 0
        self.stages.append(stage)

    def is_stopped(self) -> bool:
        return bool(self.stop_in) and self.stages.count(self.stop_in) >= self.stop_after


def make_layer(target: LoadedModel, token_ids: torch.Tensor, window: int = 32) -> EagleLayer:
    layer = EagleLayer(target, fresh_config(target), EagleShape(LAYERS, window), token_ids)
    start_like_target(layer, target.model.model.layers[-1], target.model.model.norm, 0)
    return layer


def circle_examples(target: LoadedModel, count: int, length: int = 30) -> list[Example]:
    """Texts that go round in a circle of twelve tokens: a prompt of five, an answer, and true features."""
    texts = [torch.tensor([(start + place) % 12 + 20 for place in range(length)]) for start in range(count)]
    reader = FeatureReader(target, LAYERS, length)
    found = reader.read([text[:-1] for text in texts])
    return [
        Example(
            Sample(number, 5, number, 0.0 if number % 2 else 0.7, text[5:].int(), None), text, part.clone()
        )
        for number, (text, part) in enumerate(zip(texts, found, strict=True))
    ]


@pytest.mark.parametrize("family", ["llama", "gemma2", "llama4"])
def test_features_are_what_enters_the_layers_and_what_the_head_reads(family: str) -> None:
    target = load_tiny(family)
    rng = random.Random(0)
    texts = [torch.tensor([rng.randrange(5, 500) for _ in range(length)]) for length in (7, 40, 1, 19)]
    found = list(FeatureReader(target, LAYERS, 40).read(texts))
    for text, features in zip(texts, found, strict=True):
        assert features.shape == (len(text), 4 * WIDTH)
        logits = plain_logits(target, text.tolist())
        with torch.inference_mode():
            hidden = target.model(text[None], use_cache=False, output_hidden_states=True).hidden_states
            projected = target.model.get_output_embeddings()(features[:, 3 * WIDTH :])
        if family == "gemma2":  # its logits are capped after the projection
            projected = torch.tanh(projected / 20.0) * 20.0
        for place, layer in enumerate(LAYERS):
            part = features[:, place * WIDTH : (place + 1) * WIDTH]
            torch.testing.assert_close(part, hidden[layer][0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(projected, logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("window", [32, 4])
def test_every_position_goes_on_as_a_chain_that_begins_there(window: int) -> None:
    """All at once is what one position after another gives, each seeing what a drafter would have then."""
    layer = make_layer(load_tiny("llama"), torch.arange(100), window).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 200, (1, 10), generator=generator)
    features = torch.randn(1, 10, 3 * WIDTH, generator=generator)
    chain = TrainedChain(layer, features, tokens)
    together = [chain.step()[0] for _ in range(3)]
    for start in range(7):
        alone = one_by_one(layer, features[0, : start + 1], tokens[0].tolist(), 3)
        for step, output in enumerate(alone):
            torch.testing.assert_close(together[step][start], output, rtol=1e-4, atol=1e-4)


def one_by_one(
    layer: EagleLayer, features: torch.Tensor, tokens: list[int], num_steps: int
) -> Iterator[torch.Tensor]:
    """The outputs of a chain behind the last of some features, with K/V in a list as a drafter keeps it."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    inputs = list(layer.fuse(features))
    for place in range(len(features) + num_steps - 1):
        hidden = inputs[place]
        query, key, value = layer.project(
            hidden[None], torch.tensor([tokens[place + 1]]), torch.tensor([place])
        )
        repeats = query.shape[1] // key.shape[1]
        kept.append((key[0].repeat_interleave(repeats, 0), value[0].repeat_interleave(repeats, 0)))
        seen = kept[-layer.shape.window :] if layer.shape.window else kept
        keys, values = (torch.stack([each[part] for each in seen], dim=1) for part in (0, 1))
        attended = torch.nn.functional.scaled_dot_product_attention(
            query[0][:, None], keys, values
        )  # [heads, 1, head dim]
        output = layer.finish(hidden[None], attended.reshape(1, -1))[0]
        if place >= len(features) - 1:
            inputs.append(output)
            yield output


def test_the_right_answer_teaches_each_step() -> None:
    """A layer whose guesses are the target's own distributions, moved to where they belong, has no loss."""
    target = load_tiny("llama")
    layer = make_layer(target, torch.arange(0, 512, 2))
    (example,) = circle_examples(target, 1)
    batch = Batch([example])
    # The prompt has 5 tokens of 30: the head draws token 5 at position 4, and token 29 at position 28.
    assert batch.teaches[0].nonzero()[:, 0].tolist() == list(range(4, 29))
    assert batch.taught(layer).shape == (25, WIDTH)
    _, shown = losses(layer, batch, 3)
    assert shown.shape == (3,)
    assert bool((shown > 0).all())
    own = layer.projection(example.features[:, 3 * WIDTH :]).float()
    outputs = _Teacher(own)
    layer.logits = outputs.logits  # type: ignore[method-assign]
    _, shown = losses(layer, batch, 3)
    torch.testing.assert_close(shown, torch.zeros(3), rtol=0, atol=0.02)


class _Teacher:
    """Logits in place of a layer's: at step s, position i, what the target has at i + s + 1, sharpened."""

    def __init__(self, own: torch.Tensor) -> None:
        self._own = own
        self._step = 0

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        self._step += 1
        count = len(self._own)
        # Taught positions are those whose teacher lies from 4 to 28.
        first = max(0, 4 - self._step)
        rows = self._own[first + self._step : count] / 0.8
        assert len(rows) == len(output)
        return rows


def test_training_lowers_the_loss_and_learns_to_go_on(tmp_path: Path) -> None:
    target = load_tiny("llama")
    # The tiny model's own distribution is nearly flat, so that it is told to be sure of the circle.
    examples = [sure(target, example) for example in circle_examples(target, 40, length=16)]
    layer = make_layer(target, torch.arange(64))
    before = evaluate_layer(layer, examples[30:], Watch())
    checkpoint = Checkpoint(tmp_path / "checkpoint.safetensors", "x")
    found = fit_layer(layer, examples[:30], 3, FitOptions(num_epochs=40), Watch(), checkpoint)
    assert not found.was_stopped
    assert found.last_losses[0] < 0.3 * found.first_losses[0]
    after = evaluate_layer(layer, examples[30:], Watch())
    assert before.coverage == after.coverage == 1.0
    assert before.guesses["greedy"].right[0] < 0.5
    assert after.guesses["greedy"].right[0] > 0.95
    assert after.guesses["greedy"].accepted[2] > 3 * before.guesses["greedy"].accepted[2]


def sure(target: LoadedModel, example: Example) -> Example:
    """With a state before the head that draws the next token nearly surely."""
    embedding = target.model.get_output_embeddings().weight.detach()
    features = example.features.clone()
    features[:, 3 * WIDTH :] = 40 * embedding[example.token_ids[1:]]
    return replace(example, features=features)


def test_a_run_that_was_stopped_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    target = load_tiny("llama")
    examples = circle_examples(target, 60)
    options = FitOptions(num_epochs=3, seed=1)

    def fit(name: str, watch: Watch, layer: EagleLayer) -> dict[str, torch.Tensor]:
        place = Checkpoint(tmp_path / name, "x")
        result = fit_layer(layer, examples, 2, options, watch, place)
        assert result.was_stopped is watch.is_stopped()
        return layer.state_dict()

    whole = fit("whole", Watch(), make_layer(target, torch.arange(64)))
    stopped = fit("cut", Watch("train", 2), make_layer(target, torch.arange(64)))
    assert any(not torch.equal(stopped[name], whole[name]) for name in whole)
    watch = Watch()
    resumed = fit("cut", watch, make_layer(target, torch.arange(64)))
    num_steps = 3 * len(batches([30] * 60, random.Random(0)))
    assert len(watch.stages) == num_steps - 2
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
    # A checkpoint of another run, or a damaged one, is no beginning.
    layer, watch = make_layer(target, torch.arange(64)), Watch("train", 1)
    fit_layer(layer, examples, 2, options, watch, Checkpoint(tmp_path / "cut", "y"))
    assert watch.stages == ["train"]
    (tmp_path / "cut").write_bytes(b"damaged")
    torch.testing.assert_close(
        fit("cut", Watch(), make_layer(target, torch.arange(64))), whole, rtol=0, atol=0
    )


def test_batches_have_every_text_once_and_fit() -> None:
    rng = random.Random(0)
    lengths = [rng.randint(9, 400) for _ in range(300)] + [3 * BATCH_TOKENS]
    found = batches(lengths, random.Random(1))
    assert sorted(index for batch in found for index in batch) == list(range(301))
    assert all(
        len(batch) * max(lengths[i] for i in batch) <= BATCH_TOKENS or len(batch) == 1 for batch in found
    )
    assert len(found) < 1.5 * sum(lengths) / BATCH_TOKENS
    assert found == batches(lengths, random.Random(1)) != batches(lengths, random.Random(2))


@pytest.mark.parametrize("number", [1, 2])
def test_the_evaluation_counts_what_drafting_would_give(number: int) -> None:
    """Draft after every token, K/V in a list, on the drafter's own guesses, and compare with what came."""
    target = load_tiny("llama")
    layer = make_layer(target, torch.arange(64)).requires_grad_(False)
    example = circle_examples(target, 3)[number]
    sample = example.sample
    assert (sample.temperature == 0) is (number == 1)
    # Have it right now and then: the answer is in part what it would draft itself.
    tokens = example.token_ids.tolist()
    tokens[12:14] = draft(layer, example, tokens, 11, 2)
    example = replace(
        example,
        token_ids=torch.tensor(tokens),
        sample=replace(sample, token_ids=torch.tensor(tokens[5:], dtype=torch.int32)),
    )
    counts = num_right(layer, example)
    assert len(counts) == 25 - DEPTH
    for chain, count in list(enumerate(counts.tolist()))[::3]:
        newest = sample.first_position + chain
        came = tokens[newest + 1 : newest + 1 + DEPTH]
        drafts = draft(layer, example, tokens, newest, DEPTH)
        right = next((place for place in range(DEPTH) if drafts[place] != came[place]), DEPTH)
        assert count == right
    assert counts.max() >= 1


def draft(layer: EagleLayer, example: Example, tokens: list[int], newest: int, count: int) -> list[int]:
    """The tokens that a drafter guesses after the one at position `newest`, going on from its own."""
    sample = example.sample
    drafts: list[int] = []
    for step in range(count):
        features = example.features[:newest, : 3 * WIDTH]
        known = [*tokens[: newest + 1], *drafts]
        *_, output = one_by_one(layer, features, known, step + 1)
        scores = layer.logits(output).float()
        if sample.temperature > 0:
            temperature, seed = (
                torch.tensor([sample.temperature]).double().numpy(),
                torch.tensor([sample.seed]),
            )
            position = torch.tensor([newest + 1 + step]).numpy()
            scores = couple(scores[None, None], layer.token_ids, temperature, seed.numpy(), position)[0, 0]
        drafts.append(int(layer.token_ids[scores.argmax()]))
    return drafts


def test_features_are_read_again_where_their_file_does_not_fit(tmp_path: Path) -> None:
    examples = circle_examples(load_tiny("llama"), 4)
    samples, texts = [each.sample for each in examples], [each.token_ids for each in examples]
    shards = FeatureShards(tmp_path, "one")
    assert shards.examples(0, samples, texts) is None
    shards.write(0, [each.features for each in examples])
    read = shards.examples(0, samples, texts)
    assert read is not None
    for before, after in zip(examples, read, strict=True):
        assert torch.equal(before.features, after.features)
        assert before.sample is after.sample
    assert shards.examples(0, samples[:3], texts[:3]) is None
    assert FeatureShards(tmp_path, "two").examples(0, samples, texts) is None
    path = tmp_path / "features-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert shards.examples(0, samples, texts) is None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("model") / "model")


def make_plan(output: Path) -> DrafterPlan:
    prompts = output.parent / "prompts"
    prompts.write_text("".join(f"Count to {number}.\n" for number in range(90)))
    return DrafterPlan(
        output=output,
        prompts=prompts,
        num_tokens=600,
        num_token_ids=256,
        num_epochs=2,
        max_new_tokens=16,
        batch_size=16,
        seed=0,
        threads=1,
        num_steps=3,
        window=512,
    )


def test_the_whole_run_leaves_a_drafter_that_loads_and_a_report(model: Path, tmp_path: Path) -> None:
    settings = load_settings([str(model), "--dtype", "float32"], WITHOUT_KERNELS)
    plan = make_plan(tmp_path / "out")
    watch = Watch()
    report = train_drafter(settings, plan, watch)
    assert list(dict.fromkeys(watch.stages)) == ["generate", "features", "train", "evaluate"]
    assert report is not None
    assert json.loads((plan.output / "report.json").read_text()) == report
    assert report["num_train_tokens"] + report["num_judged_tokens"] >= 600
    kinds = {"greedy", "T 0.7", "T 0.8", "T 0.9", "T 1"}
    assert report["guesses"].keys() <= kinds
    assert sum(found["num_chains"] for found in report["guesses"].values()) > 20
    target = load_model(model, settings.model)
    layer = load_eagle_layer(plan.output, target)
    assert layer.shape == EagleShape((1, 1, 0), 512)
    assert len(layer.token_ids) == 256
    recipe = saved_recipe(plan.output)
    assert recipe["guesses"] == report["guesses"]
    # The same command once more: nothing is generated, read or learned, and the drafter is the same.
    watch = Watch()
    train_drafter(settings, plan, watch)
    assert set(watch.stages) == {"evaluate"}
    torch.testing.assert_close(load_eagle_layer(plan.output, target).state_dict(), layer.state_dict())
    with pytest.raises(StartRefused, match="another model, seed or set of prompts"):
        train_drafter(settings, replace(plan, seed=1), Watch())


def test_prompts_that_the_model_writes_are_answered_too_and_kept(model: Path, tmp_path: Path) -> None:
    settings = load_settings([str(model), "--dtype", "float32"], WITHOUT_KERNELS)
    plan = replace(make_plan(tmp_path / "out"), num_own_prompts=4)
    stopped = Watch("generate", 3)
    assert train_drafter(settings, plan, stopped) is None
    assert "ask" in stopped.stages
    kept = plan.output / "samples" / OWN_PROMPTS_FILE
    texts = json.loads(kept.read_text(encoding="utf-8"))
    assert 0 < len(texts) == len(set(texts)) <= 4
    again = Watch()
    report = train_drafter(settings, plan, again)
    assert report is not None
    assert "ask" not in again.stages, "they are not written twice"
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-3])
    with pytest.raises(StartRefused, match=r"is damaged .*, and the samples there answer"):
        train_drafter(settings, plan, Watch())
    kept.unlink()
    with pytest.raises(StartRefused, match="is missing, and the samples there answer what was in it"):
        train_drafter(settings, plan, Watch())


@pytest.mark.slow
def test_the_model_writes_prompts_no_longer_than_it_may(model: Path, tmp_path: Path) -> None:
    settings = load_settings([str(model), "--dtype", "float32"], WITHOUT_KERNELS)
    plan = replace(make_plan(tmp_path / "out"), num_own_prompts=10**6, minutes=0.1)
    began = time.monotonic()
    with suppress(StartRefused):  # what is left of the minutes may be too few
        train_drafter(settings, plan, Watch())
    assert time.monotonic() - began < 30
    assert (plan.output / "samples" / OWN_PROMPTS_FILE).exists()
    # Stopped before any prompt has come.
    assert train_drafter(settings, replace(plan, output=tmp_path / "new"), Watch("ask", 0)) is None


def test_a_user_speaks_behind_what_the_template_opens_with(model: Path) -> None:
    tokenizer = Tokenizer(model)
    opening = opening_of(tokenizer)
    assert opening
    whole = tokenizer.render_chat([{"role": "user", "content": "What is it?"}])
    assert whole[: len(opening)] == opening
    rest = tokenizer.decode(whole[len(opening) :], skip_special_tokens=True)
    assert rest.startswith("What is it?")


def saved_recipe(directory: Path) -> dict[str, Any]:
    values = json.loads((directory / "config.json").read_text())
    recipe: dict[str, Any] = values["slipstream"]["recipe"]
    return recipe


@pytest.mark.slow
def test_a_run_that_is_stopped_keeps_what_it_has(model: Path, tmp_path: Path) -> None:
    settings = load_settings([str(model), "--dtype", "bfloat16"], WITHOUT_KERNELS)
    plan = make_plan(tmp_path / "out")
    assert train_drafter(settings, plan, Watch("generate")) is None
    assert train_drafter(settings, plan, Watch("features")) is None
    assert not (plan.output / "config.json").exists()
    report = train_drafter(settings, plan, Watch("train"))
    assert report is not None
    assert report["training"]["num_steps"] == 1
    assert report["training"]["was_stopped"]
    load_eagle_layer(plan.output, load_model(model, settings.model))
    report = train_drafter(settings, plan, Watch())
    assert report is not None
    assert report["training"]["num_steps"] > 1


def test_a_fit_ends_at_its_deadline_and_few_answers_are_refused(model: Path, tmp_path: Path) -> None:
    target, now = load_tiny("llama"), iter(range(1000))
    options = FitOptions(num_epochs=1000, deadline=10.0, clock=lambda: float(next(now)))
    layer = make_layer(target, torch.arange(64))
    checkpoint = Checkpoint(tmp_path / "checkpoint", "x")
    found = fit_layer(layer, circle_examples(target, 8), 1, options, Watch(), checkpoint)
    assert found.num_steps == 10
    assert not found.was_stopped
    settings = load_settings([str(model), "--dtype", "float32"], WITHOUT_KERNELS)
    with pytest.raises(StartRefused, match="too few to train on and judge by"):
        train_drafter(settings, replace(make_plan(tmp_path / "other"), num_tokens=1), Watch())


def test_a_model_of_several_lists_of_layers_is_refused_before_it_talks(tmp_path: Path) -> None:
    model = save_tiny_model("hrm_text", tmp_path / "model")
    settings = load_settings([str(model), "--dtype", "float32"], WITHOUT_KERNELS)
    watch = Watch()
    with pytest.raises(StartRefused, match="hrm_text has not one list of layers"):
        train_drafter(settings, make_plan(tmp_path / "out"), watch)
    assert not watch.stages
