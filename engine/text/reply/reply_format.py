"""ReplyFormat: how one model writes its replies, found from its template and vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from engine.plan.grammar import CompiledGrammar
from engine.text.reply.pieces import CallArguments, CallEnd, CallStart, Piece
from engine.text.reply.reasoning_format import REASONING_FORMATS, ReasoningFormat, find_reasoning
from engine.text.reply.reasoning_gate import ReasoningGate, ReasoningMarks
from engine.text.reply.reasoning_place import Phase, Place, ReasoningTrack
from engine.text.reply.reasoning_reader import read_reasoning
from engine.text.reply.reply_reader import ReplyReader
from engine.text.reply.text_feed import Parser, Stage, TextFeed, copy_until, tell_reasoning
from engine.text.structured_output import StructuredOutput
from engine.text.tools.call_teller import CallTeller
from engine.text.tools.channel_calls import CHANNELS, ChannelReader
from engine.text.tools.json_formats import HERMES
from engine.text.tools.kept_calls import grammar_of, needs_keeping
from engine.text.tools.tool_format import ToolFormat, num_forced
from engine.text.tools.tool_formats import TOOL_FORMATS, find_tools
from engine.text.tools.tool_spec import ToolRules, ToolSpec


@dataclass(frozen=True, slots=True)
class Spelling:
    """What a format needs to know of a vocabulary.

    `table` holds the bytes of each token, special ones spelled out; `encode` makes tokens of a text;
    `special` are the ids of special tokens by their text, `added` those of all tokens that were added to the
    vocabulary, special or not.
    """

    table: Sequence[bytes]
    encode: Callable[[str], Sequence[int]]
    special: Mapping[str, int]
    added: Mapping[str, int]

    def tokens_of(self, mark: str) -> Sequence[int]:
        """A mark as the model writes it: as the token that it is, if it is one."""
        return (self.added[mark],) if mark in self.added else self.encode(mark)


class ReplyFormat:
    """Reads replies and gates grammars for one model. Never written after it is built; any thread.

    `reasoning` None: the model does not think, or nobody is to see that it does. `knows_calls` is False where
    the template has calls written in no known way: then a call can only be forced.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        tools: ToolFormat,
        spelling: Spelling,
        *,
        knows_calls: bool = True,
    ) -> None:
        self.reasoning = reasoning
        self.tools = tools
        self.knows_calls = knows_calls
        self._spelling = spelling
        self._track = None if reasoning is None else ReasoningTrack(reasoning, spelling.table)

    @classmethod
    def find(
        cls,
        template: str | None,
        tool_template: str | None,
        spelling: Spelling,
        *,
        reasoning: str = "auto",
        tools: str = "auto",
    ) -> ReplyFormat:
        """The format that these templates ask for, or the ones of these names.

        Calls of a model whose template knows no tools are hermes's.
        """
        if reasoning == "auto":
            thinks = find_reasoning(template, spelling.added)
        else:
            thinks = REASONING_FORMATS.get(reasoning)
        if tools == "auto":
            calls = None if tool_template is None else find_tools(tool_template)
        else:
            calls = TOOL_FORMATS[tools]
        knows_calls = calls is not None or tool_template is None
        return cls(thinks, calls or HERMES, spelling, knows_calls=knows_calls)

    def begin(self, prompt_token_ids: Sequence[int]) -> Place | None:
        """Where a reply to this prompt begins; None for a model that does not think."""
        return None if self._track is None else self._track.start(prompt_token_ids)

    def shown_special_ids(self, *, calls: bool) -> frozenset[int]:
        """Special tokens that a reader has to see as text, with those of `calls` or without."""
        reads_calls = calls or self._has_channels
        marks = (
            *(self.reasoning.marks if self.reasoning else ()),
            *(self.tools.marks if reads_calls else ()),
        )
        special = self._spelling.special.items()
        return frozenset(token_id for text, token_id in special if any(text in mark for mark in marks))

    def reader(
        self, prompt_token_ids: Sequence[int], rules: ToolRules | None = None, *, has_form: bool = False
    ) -> ReplyReader:
        """For one reply to this prompt, which may call tools by `rules`; `has_form`: all of it is of
        a form, other than calls in the model's own format.
        """
        place = self.begin(prompt_token_ids)
        calls = self.tools.with_forced if has_form else self.tools
        stages = []
        if self._has_channels:
            within = place is not None and place.phase is Phase.THINKING
            told = None if has_form else rules
            stages.append(Stage(partial(_read_channels, told, within, self.reasoning is not None)))
        elif self.reasoning is not None and place is not None:
            openings = () if rules is None else calls.openings
            stages.append(Stage(partial(_read_reasoning, self.reasoning, place.phase, openings)))
        if rules is not None and (has_form or not self._has_channels):
            writes = not has_form and self.tools.kept is not None
            stages.append(Stage(partial(_read_calls, calls, rules, writes)))
        return ReplyReader(stages, self._track, place)

    @property
    def _has_channels(self) -> bool:
        return self.tools is CHANNELS or (self.reasoning is not None and self.reasoning.has_channels)

    def forced(self, rules: ToolRules) -> StructuredOutput:
        """The form of a reply that has to call tools: as this model writes calls, if that is JSON."""
        calls = self.tools.with_forced
        assert calls.forced is not None
        if rules.sole_form is not None:
            return rules.sole_form
        if any(map(grammar_of, rules.callable_tools)) and not self._has_channels:
            kept = self._kept_calls(rules.callable_tools, alone=num_forced(rules))
            if kept is not None:
                return kept
        return self.led(calls.forced(rules))

    def either(self, rules: ToolRules, form: StructuredOutput) -> StructuredOutput:
        """The form of a reply that calls tools, or else has this form."""
        calls = self.tools.with_forced
        assert calls.forced is not None
        return self.led(replace(calls.forced(rules), otherwise=form, param=form.param))

    def kept(self, rules: ToolRules) -> StructuredOutput | None:
        """The form of a reply whose calls, if any, are of their tools' forms; None where no tool has one.

        Holds from the text on that opens a call. None, too, for a format whose calls nothing opens.
        """
        tools = rules.callable_tools
        if not needs_keeping(tools):
            return None
        # A frame has one opening.
        has_frame = self.tools.forced is not None and len(self.tools.openings) == 1
        form = self.tools.forced(rules) if has_frame and self.tools.forced is not None else None
        if form is not None and form.frame is not None and not any(map(grammar_of, tools)):
            return replace(self.led(form), amid_text=True)
        return self._kept_calls(tools)

    def _kept_calls(self, tools: Sequence[ToolSpec], alone: int = 0) -> StructuredOutput | None:
        if self.tools.kept is None:
            return None
        calls = replace(self.tools.kept(tools), alone=alone)
        return StructuredOutput("calls", param="tools", amid_text=not alone, calls=calls)

    def led(self, form: StructuredOutput) -> StructuredOutput:
        """The same behind what stands between the reasoning and an answer; a grammar stands alone."""
        if self.reasoning is None or form.kind == "grammar":
            return form
        return replace(form, lead=self.reasoning.lead)

    def gate(
        self,
        prompt_token_ids: Sequence[int],
        vocab_size: int,
        grammar: CompiledGrammar | None,
        budget: int | None = None,
    ) -> CompiledGrammar | None:
        """`grammar` as it holds for a reply to this prompt: behind the reasoning, of `budget` tokens at most.

        None for a reply that may be anything.
        """
        place = self.begin(prompt_token_ids)
        if place is None or (place.phase is Phase.AFTER and self._thinks_once(grammar)):
            return grammar
        if grammar is None and budget is None:
            return None
        return ReasoningGate(self._marks, place, vocab_size, grammar, budget)

    def _thinks_once(self, grammar: CompiledGrammar | None) -> bool:
        return grammar is not None or self.reasoning is None or not self.reasoning.repeats

    @cached_property
    def _marks(self) -> ReasoningMarks:
        assert self.reasoning is not None and self._track is not None
        spelling, form = self._spelling, self.reasoning
        begin, end = spelling.tokens_of(form.begin), spelling.tokens_of(form.end)
        return ReasoningMarks(self._track, begin, end, spelling.table)


def _read_reasoning(
    form: ReasoningFormat,
    phase: Phase,
    openings: Collection[str],
    feed: TextFeed,
    tell: Callable[[Piece], None],
) -> Parser:
    return read_reasoning(form, phase, feed, tell, openings)


def _read_channels(
    rules: ToolRules | None, within: bool, thinks: bool, feed: TextFeed, tell: Callable[[Piece], None]
) -> Parser:
    teller = CallTeller(rules or ToolRules(()), tell, writes_grammars=True)
    think = tell_reasoning(tell) if thinks else teller.content
    return ChannelReader(feed, teller, think).read(within_thought=within)


def _read_calls(
    tools: ToolFormat,
    rules: ToolRules,
    writes_grammars: bool,
    feed: TextFeed,
    tell: Callable[[Piece], None],
) -> Parser:
    if rules.sole_form is not None:
        return _read_sole_input(rules.callable_tools[0].name, feed, tell)
    return tools.read(feed, CallTeller(rules, tell, writes_grammars=writes_grammars))


def _read_sole_input(name: str, feed: TextFeed, tell: Callable[[Piece], None]) -> Parser:
    """A reply that is the input of a custom tool and nothing else."""
    tell(CallStart(0, name, is_custom=True))
    yield from copy_until(feed, (), lambda text: tell(CallArguments(0, text, is_custom=True)))
    if not feed.cut:
        tell(CallEnd(0))
