"""Log-probabilities of prompt tokens: the model's head, run on a few rows of its hidden states at a time."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from engine.compute.loading.loader import LoadedModel
from engine.compute.runner.device import is_out_of_memory
from engine.compute.runner.layer_taps import base_name
from engine.compute.sampling.logprobs import known_logprobs
from engine.compute.sampling.row_groups import in_groups
from engine.plan.step_records import PromptRows, TokenLogprobs

log = logging.getLogger("slipstream.engine")


class PromptScorer:
    """Scores the known tokens of a prompt without ever holding the logits of all of them.

    A chunk of 2048 tokens would have 400 MB of logits at a vocabulary of 49 thousand. So a pass keeps its
    last hidden states, which are small, and runs the rest of the model, its head and what follows it, on
    groups of them. For the thread that runs the model.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._model = loaded.model
        self._device = loaded.device
        self._name = base_name(loaded.model)
        self._base = getattr(loaded.model, self._name)
        self._vocab_size = loaded.vocab_size

    @contextmanager
    def watching(self, rows: PromptRows | None) -> Iterator[list[Any]]:
        """A list that will hold what `score` needs of the pass made in this context, if there are `rows`."""
        seen: list[Any] = []
        if rows is None:
            yield seen
            return
        handle = self._base.register_forward_hook(lambda _, __, output: seen.append(output))
        try:
            yield seen
        finally:
            handle.remove()

    def score(self, rows: PromptRows | None, seen: list[Any]) -> tuple[TokenLogprobs | None, ...]:
        """A record for each of the watched pass's `rows`, None where there is none to be had.

        That is where the logits are not finite, and everywhere if scoring fails; but running out of memory
        comes through.
        """
        if rows is None:
            return ()
        try:
            return self._records(rows, seen.pop())
        except Exception as error:
            if is_out_of_memory(error):
                raise
            log.exception("the tokens of prompts could not be scored")
            return (None,) * len(rows.rows)

    def _records(self, rows: PromptRows, output: Any) -> tuple[TokenLogprobs | None, ...]:
        hidden = output.last_hidden_state[0]  # [N, hidden]
        records: list[TokenLogprobs | None] = []
        for group in in_groups(len(rows.rows), self._vocab_size):
            places = torch.from_numpy(rows.rows[group]).to(hidden.device)
            logits = self._logits(replace(output, last_hidden_state=hidden.index_select(0, places)[None]))
            records += known_logprobs(logits, rows.token_ids[group], rows.num_top[group])
        return tuple(records)

    def _logits(self, output: Any) -> torch.Tensor:
        """What the model makes of its base model's `output`, in its own dtype: [rows, vocab]."""
        token_ids = torch.zeros(output.last_hidden_state.shape[:2], dtype=torch.long, device=self._device)
        name, base = self._name, self._base
        setattr(self._model, name, _Known(output))
        try:
            logits: torch.Tensor = self._model(input_ids=token_ids, use_cache=False).logits[0]
        finally:
            setattr(self._model, name, base)
        return logits


class _Known(nn.Module):
    """Stands in for a base model whose output is known already."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._output = output

    def forward(self, *_: Any, **__: Any) -> Any:
        """The output, whatever the input."""
        return self._output
