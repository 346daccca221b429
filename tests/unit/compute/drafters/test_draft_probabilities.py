"""What drafts say they were drawn from: refused where it is no distribution, and looked at beside a pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.compute.drafters import draft_probabilities
from engine.compute.drafters.draft_probabilities import check_probabilities
from engine.compute.runner.device import idle_stream
from engine.plan.speculation.drafter import Draft, DraftResult

VOCAB_SIZE = 8
EVEN = torch.full((VOCAB_SIZE,), 1 / VOCAB_SIZE)


def drawn_from(*probs: object) -> DraftResult:
    """An answer of a token from each."""
    return DraftResult((Draft("a", 0, 1, (3,) * len(probs), probs=probs), Draft("b", 0, 1, ())), 0.0)


def one_of(value: float) -> torch.Tensor:
    probs = EVEN.clone()
    probs[5] = value
    return probs


def test_distributions_are_sound_and_so_is_an_answer_without_any() -> None:
    check_probabilities(drawn_from(EVEN, one_of(0.0), one_of(1.0)), VOCAB_SIZE)
    check_probabilities(drawn_from(), VOCAB_SIZE)


@pytest.mark.parametrize("probs", [None, EVEN.double(), EVEN[:7], EVEN[None]])
def test_what_is_no_vector_of_the_vocabulary_is_refused(probs: object) -> None:
    with pytest.raises(ValueError, match="no float32 vector of 8"):
        check_probabilities(drawn_from(EVEN, probs), VOCAB_SIZE)


@pytest.mark.parametrize("value", [-0.01, 1.01, math.nan, math.inf])
def test_what_is_no_probability_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="what is no probability"):
        check_probabilities(drawn_from(EVEN, one_of(value)), VOCAB_SIZE)


class Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes for each operation whether it was queued in a stream of its own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_entered = False
        self.seen: list[bool] = []

    @contextmanager
    def enter(self, stream: object) -> Iterator[None]:
        assert stream == "idle"
        self.is_entered = True
        yield
        self.is_entered = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen.append(self.is_entered)
        return func(*args, **kwargs or {})


def test_nothing_is_queued_behind_what_the_target_is_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer would be there only when the pass is over that it is to be ready for."""
    noting = Noting()
    monkeypatch.setattr(draft_probabilities, "idle_stream", lambda _: "idle")
    monkeypatch.setattr(draft_probabilities, "in_stream", noting.enter)
    with noting:
        check_probabilities(drawn_from(EVEN, EVEN), VOCAB_SIZE)
    assert noting.seen and all(noting.seen)
    assert idle_stream(torch.device("cpu")) is None
