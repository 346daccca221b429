"""FaultyTokenizer and FaultyDetokenizer: fail on the text of single requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.faults.fault_counter import PREPARING, FaultCounter
from engine.text.detokenizer import Detokenizer, TextDelta
from engine.text.tokenizer import Tokenizer


class FaultyTokenizer(Tokenizer):
    """A Tokenizer; a text that is tokenized is a hit of `tokenize_raise`."""

    def __init__(self, plan: FaultCounter, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._plan = plan

    def encode(self, text: str, *, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """See Tokenizer."""
        number = PREPARING.get()
        if self._plan.hit("tokenize_raise", number) is not None:
            if number is not None:
                self._plan.lose()
            raise RuntimeError("the fault plan has the tokenizer fail")
        return super().encode(text, add_special_tokens=add_special_tokens, param=param)


class FaultyDetokenizer(Detokenizer):
    """A Detokenizer; each token that is decoded is a hit of `detokenize_raise`."""

    __slots__ = ("_number", "_plan")

    def __init__(self, plan: FaultCounter, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._plan = plan
        self._number = PREPARING.get()

    def decode(self, token_ids: Sequence[int]) -> str:
        """See Detokenizer."""
        self._hit(len(token_ids))
        return super().decode(token_ids)

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """See Detokenizer."""
        self._hit(len(token_ids))
        return super().push(token_ids)

    def _hit(self, times: int) -> None:
        for _ in range(times):
            if self._plan.hit("detokenize_raise", self._number) is not None:
                raise RuntimeError("the fault plan has the detokenizer fail")
