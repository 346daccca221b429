"""The whole way to Medusa heads: load the target, let it talk, fit heads to what it said, judge and save."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from config import Settings
from engine.compute.drafters.draft_tree import default_tree
from engine.compute.drafters.medusa_heads import MedusaHeads, sample_weights
from engine.compute.loading.loader import LoadedModel, load_model
from engine.compute.loading.model_source import resolve_model
from engine.errors import StartRefused
from engine.startup.build import read_chat_template, use_compute_threads
from engine.text.tokenizer import Tokenizer
from engine.training.medusa_data import SampleGenerator
from engine.training.medusa_evaluation import SHOWN_TOPS, Evaluation, evaluate_heads
from engine.training.medusa_plan import MedusaPlan, TrainingProgress
from engine.training.medusa_prompts import builtin_prompts, read_prompts
from engine.training.medusa_samples import Positions, Sample, SampleStore, is_held_out
from engine.training.medusa_training import FitOptions, FitResult, fit_heads, frequent_token_ids

REPORT_FILE, SAMPLES_DIRECTORY = "report.json", "samples"
_SHARD_SAMPLES = 64
_GENERATION_SHARE = 0.6  # of the minutes allowed
_TRAINING_SHARE = 0.93  # of the minutes allowed, generation included
_SHORTEST_ANSWER = 32  # tokens of the context that a prompt must leave

Report = dict[str, Any]


def train_medusa_heads(settings: Settings, plan: MedusaPlan, progress: TrainingProgress) -> Report | None:
    """Do what `plan` says for the model of `settings`; the report, which lies beside the heads as JSON.

    Samples are kept, and the same call goes on from there. None when `progress` ended it before there was
    anything to save; ended later, the heads are saved as far as they were trained. Raises StartRefused.
    """
    run = _Run(settings, plan, progress)
    samples = run.generate()
    if progress.is_stopped():
        return None
    return run.train(samples)


class _Run:
    """One training run: what is loaded, and the times it may take."""

    def __init__(self, settings: Settings, plan: MedusaPlan, progress: TrainingProgress) -> None:
        self._plan = plan
        self._progress = progress
        self._began = time.monotonic()
        self._seconds: dict[str, float] = {}
        if plan.threads is None:
            use_compute_threads()
        else:
            torch.set_num_threads(plan.threads)
        directory = resolve_model(settings.model, settings.home)
        tokenizer = Tokenizer(directory, read_chat_template(settings))
        self._target = load_model(directory, settings.model)
        self._prompts = self._tokenize(tokenizer)
        about = f"{self._target.config.model_type} {_fingerprint(self._target, self._prompts, plan)}"
        self._store = SampleStore(plan.output / SAMPLES_DIRECTORY, about)
        self._model = settings.model.model

    def _tokenize(self, tokenizer: Tokenizer) -> list[list[int]]:
        plan = self._plan
        conversations = builtin_prompts(plan.seed) if plan.prompts is None else read_prompts(plan.prompts)
        longest = self._target.max_model_len - _SHORTEST_ANSWER
        prompts = []
        for messages in conversations:
            if tokenizer.has_chat_template:
                token_ids = tokenizer.render_chat(messages)
            else:
                token_ids = tokenizer.encode("\n".join(str(message.get("content")) for message in messages))
            if 0 < len(token_ids) <= longest:
                prompts.append(token_ids)
        if not prompts:
            raise StartRefused(f"No prompt leaves {_SHORTEST_ANSWER} tokens of the context for its answer.")
        return prompts

    def _deadline(self, share: float) -> float | None:
        return None if self._plan.minutes is None else self._began + 60 * self._plan.minutes * share

    def generate(self) -> list[Sample]:
        """Samples of at least `num_tokens` tokens, those of earlier runs included; fewer if time is up."""
        plan, began = self._plan, time.monotonic()
        samples = list(self._store.read())
        num_tokens = sum(len(sample.token_ids) for sample in samples)
        generator = SampleGenerator(
            self._target,
            self._prompts,
            batch_size=plan.batch_size,
            max_new_tokens=plan.max_new_tokens,
            seed=plan.seed,
        )
        deadline = self._deadline(_GENERATION_SHARE)
        fresh: list[Sample] = []
        if num_tokens < plan.num_tokens:
            for finished in generator.steps({sample.number for sample in samples}):
                fresh += finished
                num_tokens += sum(len(sample.token_ids) for sample in finished)
                self._progress.update("generate", num_tokens, plan.num_tokens, f"{num_tokens:,} tokens")
                is_over = num_tokens >= plan.num_tokens or self._progress.is_stopped()
                is_over = is_over or (deadline is not None and time.monotonic() >= deadline)
                if len(fresh) >= _SHARD_SAMPLES or (is_over and fresh):
                    self._store.append(fresh)
                    samples += fresh
                    fresh = []
                if is_over:
                    break
        self._seconds["generate"] = time.monotonic() - began
        return samples

    def train(self, samples: Sequence[Sample]) -> Report:
        """Fit, judge and save heads; the report."""
        plan = self._plan
        held_out = [sample for sample in samples if is_held_out(sample.number, len(self._prompts))]
        kept = [sample for sample in samples if not is_held_out(sample.number, len(self._prompts))]
        if len(held_out) < 2 or not kept:
            raise StartRefused(
                f"{len(samples)} answers are too few to train on and judge by: raise --tokens or --minutes."
            )
        train, judge = Positions(kept), Positions(held_out)
        vocab_size = self._target.vocab_size
        token_ids = frequent_token_ids(train.token_ids, vocab_size, min(plan.num_token_ids, vocab_size))
        heads = MedusaHeads(self._target, plan.num_heads, token_ids, default_tree(plan.num_heads))
        untrained = evaluate_heads(heads, judge, self._progress)
        options = FitOptions(plan.num_epochs, plan.seed, self._deadline(_TRAINING_SHARE))
        fitted = fit_heads(heads, train, options, self._progress)
        began = time.monotonic()
        found = evaluate_heads(heads, judge, self._progress)
        self._seconds |= {"train": fitted.seconds, "evaluate": time.monotonic() - began}
        heads.tree = found.tree
        heads.save(plan.output)
        text = json.dumps(self._report(len(train), fitted, found, untrained), indent=1) + "\n"
        (plan.output / REPORT_FILE).write_text(text, encoding="utf-8")
        return dict(json.loads(text))  # what a reader of the file gets

    def _report(
        self, num_train_tokens: int, fitted: FitResult, found: Evaluation, untrained: Evaluation
    ) -> Report:
        plan = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in asdict(self._plan).items()
        }
        return {
            "model": self._model,
            "plan": plan,
            "threads": torch.get_num_threads(),
            "dtype": str(self._target.dtype).removeprefix("torch."),
            "num_train_tokens": num_train_tokens,
            "num_judged_tokens": found.num_tokens,
            "coverage": found.coverage,
            "shown_tops": list(SHOWN_TOPS),
            "accuracy": found.accuracy,
            "tokens_per_step": found.tokens_per_step,
            "untrained_tokens_per_step": untrained.tokens_per_step,
            "tree_paths": [list(path) for path in found.tree.paths],
            "training": asdict(fitted),
            "seconds": self._seconds | {"in all": time.monotonic() - self._began},
        }


def _fingerprint(target: LoadedModel, prompts: Sequence[Sequence[int]], plan: MedusaPlan) -> str:
    """What samples depend on, in short: the target's weights, the prompts, and how they are answered."""
    digest = hashlib.sha256(sample_weights(target).numpy().tobytes())
    digest.update(json.dumps([list(map(list, prompts)), plan.seed, plan.max_new_tokens]).encode())
    return digest.hexdigest()[:32]
