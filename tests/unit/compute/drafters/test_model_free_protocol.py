"""However it was told, a model-free drafter answers as one that is told everything at once."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from engine.compute.drafters.model_free import ModelFreeDrafter
from engine.compute.drafters.ngram import NgramDrafter
from engine.compute.drafters.prediction import PredictionDrafter
from engine.compute.drafters.suffix import SuffixDrafter
from engine.compute.drafters.text_source import READ_PIECE
from engine.plan.speculation.drafter import Drafter
from tests.support.draft_jobs import ToldSequence, draft_request
from tests.support.examples import share_of

TOKEN = st.integers(0, 5)
STOP = 5


def machine(kind: Callable[[], Drafter]) -> type[RuleBasedStateMachine]:
    class Told(RuleBasedStateMachine):
        @initialize(
            prompt=st.lists(TOKEN, min_size=1, max_size=20),
            prediction=st.lists(TOKEN, max_size=20),
            stops=st.booleans(),
        )
        def open(self, prompt: list[int], prediction: list[int], stops: bool) -> None:
            request = draft_request(
                num_prompt_tokens=len(prompt), prediction=prediction, stop_token_ids=[STOP] if stops else []
            )
            self.fresh = kind()
            self.sequence = ToldSequence(kind(), prompt, request)

        @rule(num_wanted=st.integers(0, 9))
        def ask(self, num_wanted: int) -> None:
            expected = self.sequence.retell(self.fresh, num_wanted)
            answer = self.sequence.ask(num_wanted)
            assert answer == expected
            assert len(answer.token_ids) <= num_wanted
            assert STOP not in answer.token_ids[:-1] or not self.sequence.request.stop_token_ids

        @rule(num_right=st.integers(0, 9), token_id=TOKEN)
        def accept(self, num_right: int, token_id: int) -> None:
            self.sequence.commit([*self.sequence.drafts[:num_right], token_id])

        @rule(token_ids=st.lists(TOKEN, min_size=1, max_size=9))
        def commit(self, token_ids: list[int]) -> None:
            self.sequence.commit(token_ids)

        @rule(num_kept=st.integers(0, 9), token_ids=st.lists(TOKEN, max_size=4))
        def redraft(self, num_kept: int, token_ids: list[int]) -> None:
            self.sequence.redraft(min(num_kept, len(self.sequence.drafts)), token_ids)

        @rule(first=st.integers(0, 20), count=st.integers(1, 6))
        def commit_some_of_the_prediction(self, first: int, count: int) -> None:
            self.sequence.commit(self.sequence.request.prediction[first : first + count] or [0])

        @rule()
        def copy_a_piece(self) -> None:
            """Short enough to be read in one call: of more a fresh drafter says that it is behind."""
            committed = self.sequence.committed
            room = max(1, READ_PIECE // 2 - len(committed))
            self.sequence.commit(committed[len(committed) // 2 :][:room])

    return Told


@pytest.mark.parametrize(
    "kind",
    [NgramDrafter, SuffixDrafter, lambda: SuffixDrafter(max_tokens=12), PredictionDrafter, ModelFreeDrafter],
    ids=["ngram", "suffix", "full suffix", "prediction", "model free"],
)
def test_answers_depend_on_the_tokens_alone(kind: Callable[[], Drafter]) -> None:
    run_state_machine_as_test(
        machine(kind), settings=settings(max_examples=share_of(60), stateful_step_count=25, deadline=None)
    )
