"""TrainingRun: what every drafter's training begins with. Load the target, let it talk, keep what it said."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from config import Settings
from engine.compute.drafters.medusa_heads import sample_weights
from engine.compute.loading.loader import LoadedModel, load_model
from engine.compute.loading.model_source import resolve_model
from engine.compute.native.drawing import find_row_draw
from engine.compute.native.install import with_kernels
from engine.compute.runner.compute_threads import use_threads
from engine.errors import InvalidRequest, StartRefused
from engine.startup.build import read_chat_template, use_compute_threads
from engine.text.tokenizer import Tokenizer
from engine.training.own_prompts import (
    LONGEST_PROMPT,
    OWN_PROMPTS_FILE,
    keep_own_prompts,
    opening_of,
    read_own_prompts,
    write_prompts,
)
from engine.training.prompts import Message, builtin_prompts, read_prompts
from engine.training.sample_generator import SampleGenerator, SampleSizes
from engine.training.samples import Sample, SampleStore, is_held_out
from engine.training.training_plan import TrainingPlan, TrainingProgress
from engine.training.written import written

REPORT_FILE, SAMPLES_DIRECTORY = "report.json", "samples"
_SHARD_SAMPLES = 64
_ASKING_SHARE = 0.1  # of the minutes allowed, for the prompts that the model writes
_SHORTEST_ANSWER = 32  # tokens of the context that a prompt must leave

Report = dict[str, Any]


class TrainingRun:
    """One run: what is loaded, what the target said, and the times that it took.

    `target` has transformers' own modules; texts come from another copy, on the kernels that serve it.
    """

    def __init__(
        self, settings: Settings, plan: TrainingPlan, progress: TrainingProgress, *, keeps_hidden: bool
    ) -> None:
        """Loads the target. Raises StartRefused."""
        self._plan = plan
        self._progress = progress
        self._began = time.monotonic()
        self.seconds: dict[str, float] = {}
        if plan.threads is None:
            use_compute_threads()
        else:
            torch.set_num_threads(plan.threads)
        self._num_threads = torch.get_num_threads()
        self._settings = settings
        self._directory = resolve_model(settings.model, settings.home)
        self._tokenizer = Tokenizer(self._directory, read_chat_template(settings))
        self.target = load_model(self._directory, settings.model)
        conversations = builtin_prompts(plan.seed) if plan.prompts is None else read_prompts(plan.prompts)
        self.prompts = self._tokenize(conversations)
        if not self.prompts:
            raise StartRefused(f"No prompt leaves {_SHORTEST_ANSWER} tokens of the context for its answer.")
        with written(plan.output):  # known before hours of work, not behind them
            (plan.output / SAMPLES_DIRECTORY).mkdir(parents=True, exist_ok=True)
        self._keeps_hidden = keeps_hidden
        fingerprint = _fingerprint(self.target, self.prompts, plan)
        self.about = f"{self.target.config.model_type} {fingerprint}" + (" texts" if not keeps_hidden else "")
        self.store = SampleStore(plan.output / SAMPLES_DIRECTORY, self.about)

    def _tokenize(self, conversations: Sequence[Sequence[Message]]) -> list[list[int]]:
        tokenizer, longest = self._tokenizer, self.target.max_model_len - _SHORTEST_ANSWER
        prompts = []
        for number, messages in enumerate(conversations, 1):
            try:
                if tokenizer.has_chat_template:
                    token_ids = tokenizer.render_chat(messages)
                else:
                    text = "\n".join(str(message.get("content")) for message in messages)
                    token_ids = tokenizer.encode(text)
            except InvalidRequest as error:
                source = "The built-in" if self._plan.prompts is None else f"--prompts {self._plan.prompts}:"
                raise StartRefused(f"{source} prompt {number} cannot be used: {error}") from error
            if 0 < len(token_ids) <= longest:
                prompts.append(token_ids)
        return prompts

    def _add_own_prompts(self, served: LoadedModel) -> None:
        """Have the model write prompts, or take those that an earlier run left, and mix them with the others.

        They are kept with the samples, which are numbered by them.
        """
        plan, directory = self._plan, self._plan.output / SAMPLES_DIRECTORY
        opening = opening_of(self._tokenizer) if plan.num_own_prompts else None
        if opening is None:
            return
        texts = read_own_prompts(directory)
        if texts is None and next(self.store.shards(), None) is not None:
            raise StartRefused(
                f"{directory / OWN_PROMPTS_FILE} is missing, and the samples there answer what was in it: "
                "choose another --output, or remove them."
            )
        if texts is None:
            texts, began = [], time.monotonic()
            generator = self._generator(served, [opening], LONGEST_PROMPT)
            stops, wanted = self.target.eos_token_ids, plan.num_own_prompts
            deadline = self.deadline(_ASKING_SHARE)

            def is_over() -> bool:
                is_late = deadline is not None and time.monotonic() >= deadline
                return is_late or self._progress.is_stopped()

            for text in write_prompts(generator, self._tokenizer, stops, wanted, is_over):
                texts.append(text)
                self._progress.update("ask", len(texts), wanted, f"{len(texts):,} prompts")
            if self._progress.is_stopped():
                return
            keep_own_prompts(directory, texts)
            self.seconds["ask"] = time.monotonic() - began
        own = [[{"role": "user", "content": text}] for text in texts]
        self.prompts += self._tokenize(own)
        random.Random(plan.seed).shuffle(self.prompts)

    def _generator(
        self, served: LoadedModel, prompts: Sequence[Sequence[int]], longest: int
    ) -> SampleGenerator:
        return SampleGenerator(
            served,
            prompts,
            sizes=SampleSizes(self._plan.batch_size, longest),
            seed=self._plan.seed,
            keeps_hidden=self._keeps_hidden,
            row_draw=find_row_draw(served, self._settings.model, self._settings.home),
        )

    def served_target(self) -> LoadedModel:
        """Another copy of the target, as it is served: on compiled kernels where these can be had."""
        settings = self._settings

        def load() -> LoadedModel:
            return load_model(self._directory, settings.model)

        served = with_kernels(load(), settings.model, settings.home, load)
        use_threads(served, self._num_threads)
        return served

    def use_all_threads(self) -> None:
        """Have torch compute on all threads of the plan again, after a served copy."""
        torch.set_num_threads(self._num_threads)

    def deadline(self, share: float) -> float | None:
        """When this share of the minutes allowed is over, on the monotonic clock; None without a limit."""
        minutes = self._plan.minutes
        return None if minutes is None else self._began + 60 * minutes * share

    def generate(self, served: LoadedModel, share: float) -> list[Sample]:
        """Samples of at least `num_tokens` tokens, those of earlier runs included; fewer if time is up.

        `share` of the minutes allowed may be over by then.
        """
        self._add_own_prompts(served)
        if self._progress.is_stopped():
            return []
        plan, began = self._plan, time.monotonic()
        samples = list(self.store.read())
        num_tokens = sum(len(sample.token_ids) for sample in samples)
        generator = self._generator(served, self.prompts, plan.max_new_tokens)
        deadline = self.deadline(share)
        fresh: list[Sample] = []
        if num_tokens < plan.num_tokens:
            for finished in generator.steps({sample.number for sample in samples}):
                fresh += finished
                num_tokens += sum(len(sample.token_ids) for sample in finished)
                self._progress.update("generate", num_tokens, plan.num_tokens, f"{num_tokens:,} tokens")
                is_over = num_tokens >= plan.num_tokens or self._progress.is_stopped()
                is_over = is_over or (deadline is not None and time.monotonic() >= deadline)
                if len(fresh) >= _SHARD_SAMPLES or (is_over and fresh):
                    self.store.append(fresh)
                    samples += fresh
                    fresh = []
                if is_over:
                    break
        self.seconds["generate"] = time.monotonic() - began
        return samples

    def is_held_out(self, sample: Sample) -> bool:
        """Whether it is for the evaluation only."""
        return is_held_out(sample.number, len(self.prompts))

    def too_few(self, num_samples: int) -> StartRefused:
        """What to raise where samples to train on, or to judge by, are missing."""
        return StartRefused(
            f"{num_samples} answers are too few to train on and judge by: raise --tokens or --minutes."
        )

    def write_report(self, found: Report) -> Report:
        """Write `found`, and what is common to all, beside the drafter; what a reader of the file gets."""
        plan = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in asdict(self._plan).items()
        }
        report = {
            "model": self._settings.model.model,
            "plan": plan,
            "threads": self._num_threads,
            "dtype": str(self.target.dtype).removeprefix("torch."),
            **found,
            "seconds": self.seconds | {"in all": time.monotonic() - self._began},
        }
        text = json.dumps(report, indent=1) + "\n"
        with written(self._plan.output / REPORT_FILE):
            (self._plan.output / REPORT_FILE).write_text(text, encoding="utf-8")
        return dict(json.loads(text))


def _fingerprint(target: LoadedModel, prompts: Sequence[Sequence[int]], plan: TrainingPlan) -> str:
    """What samples depend on, in short: the target's weights, the prompts, and how they are answered."""
    digest = hashlib.sha256(sample_weights(target).numpy().tobytes())
    sizes = [plan.seed, plan.max_new_tokens, plan.num_own_prompts]
    digest.update(json.dumps([list(map(list, prompts)), *sizes]).encode())
    return digest.hexdigest()[:32]
