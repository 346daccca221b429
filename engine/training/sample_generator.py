"""SampleGenerator: lets the target answer prompts, and may keep the hidden states that it drew tokens from.

The target runs as it is served, through the scheduler and the runner, so that drafters learn from just what
they will be given.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from engine.compute.drafters.medusa import as_tensor
from engine.compute.loading.loader import LoadedModel
from engine.compute.runner.model_runner import ForDrafts, ModelRunner
from engine.compute.sampling.sampler import RowDraw, Sampler
from engine.errors import StartRefused
from engine.plan.kv.paged_kv_manager import PagedKvManager
from engine.plan.request import FinishReason, Request, SamplingParams
from engine.plan.scheduling.batcher import ContinuousBatcher
from engine.plan.scheduling.policy import make_policy
from engine.plan.scheduling.step_planner import BatchConfig
from engine.training.samples import Sample

_BLOCK_SIZE = 16
_MAX_BATCHED_TOKENS = 1024
_TEMPERATURES = (0.7, 0.8, 0.9, 1.0)
_MOST_FAILED = 2  # batches of answers in a row


@dataclass(frozen=True, slots=True)
class SampleSizes:
    """How many samples are made at a time, and how many tokens each may have."""

    batch_size: int
    max_new_tokens: int


class SampleGenerator:
    """Answers prompt after prompt, some greedily and some at a temperature, many at a time.

    Sample n answers prompt n modulo their number; it is the same whatever is generated beside it, but for
    rounding. Greedy answers are given once a prompt at most: more would be copies.
    """

    def __init__(
        self,
        target: LoadedModel,
        prompts: Sequence[Sequence[int]],
        *,
        sizes: SampleSizes,
        seed: int,
        keeps_hidden: bool,
        row_draw: RowDraw | None = None,
    ) -> None:
        """`prompts` are token ids, at least one, each shorter than the model's context.

        `row_draw` is as for Sampler: without it, drawing takes most of a step.
        """
        self._target = target
        self._prompts = prompts
        self._max_new_tokens = sizes.max_new_tokens
        self._seed = seed
        batch_size = self._batch_size = sizes.batch_size
        longest = min(max(map(len, prompts)) + sizes.max_new_tokens, target.max_model_len)
        blocks_each = -(-longest // _BLOCK_SIZE)
        kv = PagedKvManager(batch_size * blocks_each, _BLOCK_SIZE, batch_size, blocks_each)
        config = BatchConfig(
            max_num_seqs=batch_size,
            max_num_batched_tokens=max(_MAX_BATCHED_TOKENS, batch_size),
            max_prefill_tokens=_MAX_BATCHED_TOKENS,
            max_decode_seqs=batch_size,
            max_model_len=longest,
            max_logits_rows=batch_size,
        )
        self._batcher = ContinuousBatcher(config, kv, make_policy("fcfs", 0.0))
        sampler = Sampler(target.vocab_size, target.device, row_draw)
        self._runner = ModelRunner(
            target, kv.num_blocks, _BLOCK_SIZE, sampler, for_drafts=ForDrafts(keeps_features=keeps_hidden)
        )
        self._open: dict[str, _Growing] = {}
        self._num_failed = 0  # answers in a row

    def steps(self, done: set[int]) -> Iterator[list[Sample]]:
        """Run step after step without end, leaving out the samples `done`; each gives those it finished.

        Errors of the forward pass come through. Raises StartRefused where no answer comes to an end.
        """
        next_number = 0
        while True:
            while len(self._open) < self._batch_size:
                if next_number not in done:
                    self._begin(next_number)
                next_number += 1
            yield self._step()

    def _begin(self, number: int) -> None:
        prompt = self._prompts[number % len(self._prompts)]
        rng = random.Random(f"{self._seed} {number}")
        is_greedy = number < len(self._prompts) and rng.random() < 0.5
        sampling = SamplingParams(
            max_tokens=min(self._max_new_tokens, self._target.max_model_len - len(prompt)),
            temperature=0.0 if is_greedy else rng.choice(_TEMPERATURES),
            seed=rng.getrandbits(63),
        )
        request = Request(
            request_id=str(number),
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            sampling=sampling,
            stop_token_ids=self._target.eos_token_ids,
            arrival=number,
            arrival_time=float(number),
        )
        self._open[request.request_id] = _Growing(request)
        self._batcher.add(request)

    def _step(self) -> list[Sample]:
        decision = self._batcher.step()
        assert decision.inputs is not None, "there is room for every sequence"
        result = self._runner.run(decision.inputs)
        finished = []
        hidden = [rows for rows in result.features or () if rows is not None]
        for token in self._batcher.commit(decision, result.rows):
            growing = self._open[token.request.request_id]
            if hidden:
                growing.hidden.append(as_tensor(hidden[token.row])[0])  # without drafts: one row a sequence
            if token.finish_reason is not None:
                del self._open[token.request.request_id]
                if token.finish_reason is not FinishReason.ERROR:
                    finished.append(growing.sample())
                self._num_failed = self._num_failed + 1 if token.finish_reason is FinishReason.ERROR else 0
        if self._num_failed > _MOST_FAILED * self._batch_size:
            raise StartRefused("The model's answers fail: its logits are not finite.")
        return finished


@dataclass(slots=True)
class _Growing:
    """A sample in the making."""

    request: Request
    hidden: list[torch.Tensor] = field(default_factory=list)

    def sample(self) -> Sample:
        request = self.request
        return Sample(
            number=int(request.request_id),
            first_position=request.num_prompt_tokens,
            seed=request.sampling.seed,
            temperature=request.sampling.temperature,
            token_ids=torch.tensor(request.output_token_ids, dtype=torch.int32),
            hidden=torch.stack(self.hidden).cpu() if self.hidden else None,
        )
