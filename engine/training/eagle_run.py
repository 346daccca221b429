"""The whole way to a drafter of one layer: let the target talk, fit the layer to it, judge and save it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from config import Settings
from engine.compute.drafters.eagle_layer import EagleLayer, EagleShape, fresh_config
from engine.compute.loading.loader import LoadedModel
from engine.compute.runner.layer_taps import base_name, can_tap, layers_of
from engine.errors import StartRefused
from engine.training.eagle_evaluation import Evaluation, evaluate_layer
from engine.training.eagle_features import Example, FeatureReader, FeatureShards
from engine.training.eagle_training import (
    Checkpoint,
    fit_layer,
    fold_temperature,
    start_like_target,
)
from engine.training.fitting import FitOptions, FitResult, frequent_token_ids
from engine.training.samples import Sample
from engine.training.training_plan import DrafterPlan, TrainingProgress
from engine.training.training_run import SAMPLES_DIRECTORY, Report, TrainingRun
from engine.training.written import written

_GENERATION_SHARE, _FEATURES_SHARE, _TRAINING_SHARE = (
    0.3,
    0.4,
    0.95,
)  # of the minutes allowed, each to its end
_LEAST_ANSWER = 8  # tokens; shorter ones teach and show nothing


def train_drafter(settings: Settings, plan: DrafterPlan, progress: TrainingProgress) -> Report | None:
    """Do what `plan` says for the model of `settings`; the report, which lies beside the drafter as JSON.

    Texts, their features and checkpoints are kept, and the same call goes on from there. None when `progress`
    ended it before there was anything to save; ended later, the drafter is saved as far as it was trained.
    Raises StartRefused.
    """
    run = TrainingRun(settings, plan, progress, keeps_hidden=False)
    if run.target.keeps_state:
        raise StartRefused(
            "train-drafter: the features of a recurrent model's layers are not read for training."
        )
    if not can_tap(getattr(run.target.model, base_name(run.target.model))):
        raise StartRefused(
            f"train-drafter: {run.target.config.model_type} has not one list of layers with a row a token."
        )
    shape = EagleShape.for_target(int(run.target.config.num_hidden_layers), plan.window)
    served = run.served_target()
    samples = run.generate(served, _GENERATION_SHARE)
    if progress.is_stopped():
        return None
    examples = _read_features(run, served, shape, plan, progress)
    del served
    run.use_all_threads()
    return None if progress.is_stopped() else _train(run, shape, examples, len(samples), plan, progress)


def _read_features(
    run: TrainingRun, served: LoadedModel, shape: EagleShape, plan: DrafterPlan, progress: TrainingProgress
) -> list[Example]:
    """Examples of all samples, or of as many as there is time for."""
    began, deadline = time.monotonic(), run.deadline(_FEATURES_SHARE)
    about = f"{run.about} layers {shape.feature_layers}"
    shards = FeatureShards(plan.output / SAMPLES_DIRECTORY, about)
    longest = max(map(len, run.prompts)) + plan.max_new_tokens
    reader = FeatureReader(served, shape.feature_layers, min(longest, served.max_model_len))
    stored = list(run.store.shards())
    examples: list[Example] = []
    for number, samples in enumerate(stored):
        texts = [_text(run, sample) for sample in samples]
        found = shards.examples(number, samples, texts)
        if found is None:
            shards.write(number, list(reader.read([text[:-1] for text in texts])))
            found = shards.examples(number, samples, texts)
            progress.update("features", number + 1, len(stored), f"{len(examples):,} answers")
        examples += found or []
        if progress.is_stopped() or (deadline is not None and time.monotonic() >= deadline):
            break
    run.seconds["features"] = time.monotonic() - began
    return [example for example in examples if example.num_answered >= _LEAST_ANSWER]


def _text(run: TrainingRun, sample: Sample) -> torch.Tensor:
    """The prompt and the answer, int64."""
    prompt = run.prompts[sample.number % len(run.prompts)]
    return torch.cat([torch.tensor(prompt), sample.token_ids.long()])


def _train(
    run: TrainingRun,
    shape: EagleShape,
    examples: Sequence[Example],
    num_samples: int,
    plan: DrafterPlan,
    progress: TrainingProgress,
) -> Report:
    """Fit, judge and save the layer; the report."""
    judge = [example for example in examples if run.is_held_out(example.sample)]
    train = [example for example in examples if not run.is_held_out(example.sample)]
    if len(judge) < 2 or not train:
        raise run.too_few(num_samples)
    layer = _fresh_layer(run.target, shape, train, plan)
    deadline = run.deadline(_TRAINING_SHARE)
    checkpoint = _checkpoint(run, plan, len(train))
    options = FitOptions(plan.num_epochs, plan.seed, deadline)
    fitted = fit_layer(layer, train, plan.num_steps, options, progress, checkpoint)
    began = time.monotonic()
    fold_temperature(layer)
    layer.requires_grad_(False)
    layer.round_to(torch.bfloat16)  # what is saved is what is judged
    layer.round_to(run.target.dtype)
    found = evaluate_layer(layer, judge, progress)
    run.seconds |= {"train": fitted.seconds, "evaluate": time.monotonic() - began}
    results = _results(train, fitted, found)
    layer.round_to(torch.bfloat16)
    with written(plan.output):
        layer.save(plan.output, recipe=_recipe(plan, results))
    return run.write_report(results)


def _fresh_layer(
    target: LoadedModel, shape: EagleShape, train: Sequence[Example], plan: DrafterPlan
) -> EagleLayer:
    answers = torch.cat([example.sample.token_ids for example in train]).long()
    num_token_ids = min(plan.num_token_ids, target.vocab_size)
    token_ids = frequent_token_ids(answers, target.vocab_size, num_token_ids).sort().values
    layer = EagleLayer(target, fresh_config(target), shape, token_ids)
    base = getattr(target.model, base_name(target.model))
    start_like_target(layer, layers_of(base)[-1], getattr(base, "norm", None), plan.seed)
    return layer


def _checkpoint(run: TrainingRun, plan: DrafterPlan, num_train: int) -> Checkpoint:
    """Where the fit is kept, and what it depends on."""
    parts = (run.about, num_train, plan.num_epochs, plan.num_steps, plan.num_token_ids, plan.window)
    path: Path = plan.output / SAMPLES_DIRECTORY / "checkpoint.safetensors"
    return Checkpoint(path, " ".join(map(str, parts)))


def _results(train: Sequence[Example], fitted: FitResult, found: Evaluation) -> Report:
    return {
        "num_train_tokens": sum(example.num_answered for example in train),
        "num_judged_tokens": found.num_tokens,
        "coverage": found.coverage,
        "guesses": {kind: asdict(each) for kind, each in found.guesses.items()},
        "training": asdict(fitted),
    }


def _recipe(plan: DrafterPlan, results: Report) -> Report:
    """How the layer came to be, for its own config.json."""
    names = ("num_epochs", "num_steps", "num_token_ids", "max_new_tokens", "seed")
    kept = ("num_train_tokens", "num_judged_tokens", "coverage", "guesses")
    return {name: getattr(plan, name) for name in names} | {name: results[name] for name in kept}
