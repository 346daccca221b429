"""CudaRunner: runs steps on a GPU without waiting for it; what the host need not know stays there."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from engine.compute.cuda.device_draw import (
    TORCH_DRAWS,
    DeviceDraws,
    DrawColumns,
    can_draw,
    column_words,
    filtered_rows,
)
from engine.compute.cuda.device_ints import DeviceInts
from engine.compute.cuda.graphs.device_pass import DevicePass, EagerPasses, TokenMemory
from engine.compute.cuda.graphs.launched import DrawnTokens, Launched, StepMarks
from engine.compute.cuda.graphs.recorder import Recorder
from engine.compute.cuda.graphs.step_graphs import GraphLimits, StepGraphs
from engine.compute.runner.device import mark, out_of_memory_named
from engine.compute.runner.dummy_steps import plain_sampling
from engine.compute.runner.model_runner import ModelRunner
from engine.compute.verification.draft_rows import DraftRows
from engine.compute.verification.verified import Verified
from engine.plan.step_records import Int32, Int64, SampledRows, SamplingInputs, StepInputs, StepResult

_LEAST_PLACES = 4096  # steps that only measure or warm up may be larger than those served


class CudaRunner:
    """An AheadRunner over the tensors and the parts of `runner`, which it has for itself.

    A step's inputs go to the device in one copy and its tokens come back in one; of a step that asks for
    more than drawing (adjusted logits, log-probabilities, drafts that are trees or judged by chance), the
    launch waits for the device and does what ModelRunner does. Steps are of up to `max_rows` rows. Every
    method runs on the one thread that made it; a launched step may be waited for on any.
    """

    def __init__(
        self,
        runner: ModelRunner,
        max_rows: int,
        limits: GraphLimits,
        recorder: Recorder,
        draws: DeviceDraws = TORCH_DRAWS,
    ) -> None:
        self._runner = runner
        self._recorder = recorder
        self.kv = kv = runner.kv
        self.swap = runner.swap
        num_places = max(max_rows, _LEAST_PLACES, *(shape.num_tokens for shape in limits.shapes()))
        self._drawn = torch.zeros(num_places, dtype=torch.int64, device=kv.device)
        self._places = np.zeros(0, np.int64)  # of the last launch's rows in `_drawn`
        self._judges_by_match = runner.for_drafts.verification == "match"
        keeps_features = runner.for_drafts.keeps_features
        self._draw_filtered = draws.filtered
        self._tokens = tokens = TokenMemory(self._drawn, draws.plain)
        self._eager = EagerPasses(runner.forward, kv, tokens, keeps_features=keeps_features)
        self.graphs = StepGraphs(runner.forward, kv, tokens, limits._replace(keeps_features=keeps_features))

    @property
    def pass_modules(self) -> tuple[torch.nn.Module, ...]:
        """Whose calls are passes, beside those of the model itself: for who hooks passes."""
        return (self.graphs.module,)

    def warm_up(self) -> None:
        """Have everything compiled and recorded that serving needs, so that no request is slow for it."""
        self._runner.warm_up()
        self._warm_up_draw()
        self.graphs.record(self._recorder)

    @torch.inference_mode()
    def _warm_up_draw(self) -> None:
        """Have both draws compiled for logits as the model's mostly are, even if no recording does."""
        loaded = self._runner.forward.loaded
        logits = torch.zeros((1, loaded.vocab_size), dtype=loaded.dtype, device=self.kv.device)
        places = np.zeros(1, np.int64)
        words = self._send(column_words(plain_sampling(np.zeros(1)), places, 1))
        self._tokens.draw(logits, DrawColumns.of({name: words[name] for name in DrawColumns._fields}))
        filtered = replace(plain_sampling(places, temperature=1.0), top_k=np.ones(1, np.int32))
        self._draw_filtered_rows(logits, places, filtered)

    def run(self, inputs: StepInputs) -> StepResult:
        """See ModelRunner.run."""
        return self.launch(inputs).wait()

    @torch.inference_mode()
    def launch(self, inputs: StepInputs) -> Launched:
        """Queue a step: move blocks, write K/V, attend, draw. See AheadRunner, and ModelRunner.run."""
        runner, device = self._runner, self.kv.device
        num_swapped = len(inputs.swap_out) + len(inputs.swap_in)
        with out_of_memory_named():
            self.swap.reserve(copy.target for copy in inputs.swap_out)
            start = mark(device)
            runner.move_blocks(inputs)
            begin = mark(device) if num_swapped else start
            with runner.scorer.watching(inputs.prompt_rows) as seen:
                under_way = self._pass(inputs)
            middle = mark(device)
            drafts = None if inputs.drafts is None else DraftRows.of(inputs.drafts)
            if self._can_wait(inputs, drafts):
                drawn = self._draw(under_way, inputs)
                verdict = partial(drawn.verdict, inputs, drafts)
                features = self._features(under_way, inputs, Verified(SampledRows([])))
            else:
                verified = self._judge(under_way, inputs)
                verdict = partial(_known, verified)
                features = self._features(under_way, inputs, verified)
            scores = runner.scorer.score(inputs.prompt_rows, seen)
        marks = StepMarks(start, begin, middle, mark(device))
        return Launched(marks, verdict, num_swapped * self.kv.block_bytes, features, scores)

    def _pass(self, inputs: StepInputs) -> DevicePass:
        """The pass, recorded or not, over tokens that the last launch has drawn."""
        previous, rows = None, inputs.previous_rows
        if rows is not None:
            previous = np.full(len(rows), -1)
            previous[rows >= 0] = self._places[rows[rows >= 0]]
        return self.graphs.start(inputs, previous) or self._eager.start(inputs, previous)

    def _can_wait(self, inputs: StepInputs, drafts: DraftRows | None) -> bool:
        """Whether the host need not know now what is drawn. Features are of rows that the verdict names."""
        if drafts is not None and not (
            self._judges_by_match and drafts.are_chains and not self._runner.for_drafts.keeps_features
        ):
            return False
        return can_draw(inputs.sampling)

    def _draw(self, under_way: DevicePass, inputs: StepInputs) -> DrawnTokens:
        """Queue the draw of every row, and the copy of what comes of it."""
        places = under_way.places
        if len(places):
            under_way.draw()
        self._draw_filtered_rows(under_way.logits, places, inputs.sampling)
        self._places = places
        count = int(places[-1]) + 1 if len(places) else 0
        host = torch.empty(count, dtype=torch.int64, pin_memory=self.kv.device.type == "cuda")
        host.copy_(self._drawn[:count], non_blocking=True)
        return DrawnTokens(host, places)

    def _draw_filtered_rows(self, logits: torch.Tensor, places: Int64, sampling: SamplingInputs) -> None:
        """Queue the draw of those rows of `sampling`, at their `places`, that top-k or top-p filters."""
        filtered = filtered_rows(sampling, logits.shape[1])
        if filtered is None:
            return
        words = self._send({**filtered.words, "places": places[filtered.rows].astype(np.int32)})
        at = words["places"].long()
        sent = {name: words[name] for name in filtered.words}
        drawn = self._draw_filtered(logits, at, filtered.filters(sent), sent["keys"])
        self._drawn.index_copy_(0, at, drawn)

    def _judge(self, under_way: DevicePass, inputs: StepInputs) -> Verified:
        """Wait for the logits and have the step decided; the next one finds its tokens here all the same."""
        logits, places = under_way.logits, under_way.places
        if len(logits) != len(places):
            logits = logits.index_select(0, self._at(places))
        verified = self._runner.judge(logits, inputs)
        self._places = np.arange(len(places))
        self._drawn[: len(places)].copy_(self._at(np.array(verified.rows.token_ids, np.int64)))
        return verified

    def _features(
        self, under_way: DevicePass, inputs: StepInputs, verified: Verified
    ) -> tuple[torch.Tensor | None, ...] | None:
        """A copy of what drafters read of the pass; the next one may write over it."""
        if under_way.hidden is None:
            return None
        for_drafts = self._runner.for_drafts
        if for_drafts.feature_layers:
            hidden = under_way.hidden[: len(inputs.token_ids)].clone()
        else:
            hidden = under_way.hidden.index_select(0, self._at(under_way.places))
        return for_drafts.features(hidden, inputs, verified)

    def _at(self, numbers: Int64) -> torch.Tensor:
        """The numbers on the device, int64 [n], sent without waiting."""
        return self._send({"numbers": numbers.astype(np.int32)})["numbers"].long()

    def _send(self, arrays: dict[str, Int32]) -> DeviceInts:
        ints = DeviceInts({name: array.shape for name, array in arrays.items()}, self.kv.device)
        ints.put(arrays)
        return ints


def _known(verified: Verified) -> Verified:
    return verified
