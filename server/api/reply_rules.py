"""ReplyRules: how the replies to one chat are read, whichever API it came by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine import CompiledGrammar, Engine, ReplyReader, StructuredOutput, ToolRules
from server.http.errors import invalid

_UNKNOWN_CALLS = (
    "The model's chat template has tool calls written in a way that is not known here: --tool-call-parser "
    "names one, and 'tool_choice' can force a call."
)


@dataclass(frozen=True, slots=True)
class ReplyRules:
    """What may be thought and called. `tools` None: no tool may be called, so nothing is read as a call.

    `thinking_budget` is the most tokens of reasoning; None for no limit. With `may_think` False there is
    none, even where the chat template cannot be told so. `has_form`: all that is said is
    of a form, other than calls in the model's own format.
    """

    tools: ToolRules | None = None
    thinking_budget: int | None = None
    may_think: bool = True
    has_form: bool = False

    @property
    def budget(self) -> int | None:
        """Tokens of reasoning that are left to a reply; None for no limit."""
        return self.thinking_budget if self.may_think else 0

    def structure(self, engine: Engine, form: StructuredOutput | None) -> StructuredOutput | None:
        """The form of a reply whose content has to have `form`, and that may or must call something.

        None for a reply that may be anything. Raises ApiError where calls could not be told from text.
        """
        reply_format = engine.reply_format
        if self.tools is None:
            return None if form is None else reply_format.led(form)
        if self.tools.choice.is_forced:
            return reply_format.forced(self.tools)
        if form is not None:
            return reply_format.either(self.tools, form)
        if not reply_format.knows_calls:
            raise invalid(_UNKNOWN_CALLS, "tools")
        return reply_format.kept(self.tools)

    def shown_special_ids(self, engine: Engine) -> frozenset[int]:
        """Special tokens that a reader of these replies has to see as text."""
        return engine.reply_format.shown_special_ids(calls=self.tools is not None)

    def gate(
        self, engine: Engine, prompt_token_ids: Sequence[int], grammar: CompiledGrammar | None
    ) -> CompiledGrammar | None:
        """`grammar` behind the reasoning of a reply to this prompt; None: it may be anything."""
        vocab_size = engine.info.vocab_size
        return engine.reply_format.gate(prompt_token_ids, vocab_size, grammar, self.budget)

    def reader(self, engine: Engine, prompt_token_ids: Sequence[int]) -> ReplyReader:
        """For one reply to this prompt."""
        return engine.reply_format.reader(prompt_token_ids, self.tools, has_form=self.has_form)
