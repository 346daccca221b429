"""ReasoningFormat: how the models of one family mark what they think before they answer, as data."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning stands between `begin` and `end`; whitespace next to either mark belongs to the mark.

    The template may have written `begin` at the end of the prompt, or both marks where nothing is to be
    thought; else the model writes `begin` first of all, or no reasoning. `repeats`: it may think again behind
    some content. `insists`: it always thinks first. `answer` are the marks that some models put around the
    content that follows; either may be missing. `lead` is what stands between `end` and an answer that must
    have a form. `has_channels` is for replies that are messages with a header each (gpt-oss).
    """

    begin: str
    end: str
    repeats: bool = False
    insists: bool = False
    answer: tuple[str, str] | None = None
    lead: str = ""
    has_channels: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that a reader of replies has to see."""
        return (self.begin, self.end, *(self.answer or ()))


THINK = ReasoningFormat("<think>", "</think>")
_RESPONSE = ReasoningFormat("<think>", "</think>", answer=("<response>", "</response>"))
_ANSWER = ReasoningFormat("<think>", "</think>", answer=("<answer>", "</answer>"))
_MAGISTRAL = ReasoningFormat("[THINK]", "[/THINK]")
_GRANITE_IN_WORDS = ReasoningFormat("Here is my thought process:", "Here is my response:")
_GEMMA = ReasoningFormat("<|channel>thought", "<channel|>", repeats=True)
_SEED = ReasoningFormat("<seed:think>", "</seed:think>")
_KIMI_VL = ReasoningFormat("◁think▷", "◁/think▷")
_COMMAND = ReasoningFormat(
    "<|START_THINKING|>", "<|END_THINKING|>", answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>")
)
HARMONY = ReasoningFormat(
    "<|channel|>analysis<|message|>",
    "<|end|>",
    repeats=True,
    insists=True,
    lead="<|start|>assistant<|channel|>final<|message|>",
    has_channels=True,
)

# By the names that people know from other servers; `auto` asks `find_reasoning`.
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "command-a": _COMMAND,
    "deepseek-r1": THINK,
    "deepseek-v3": THINK,
    "ernie45": THINK,
    "gemma4": _GEMMA,
    "glm45": THINK,
    "gpt-oss": HARMONY,
    "granite": _GRANITE_IN_WORDS,
    "granite33": _RESPONSE,
    "hunyuan-a13b": _ANSWER,
    "kimi-k2": THINK,
    "kimi-vl": _KIMI_VL,
    "magistral": _MAGISTRAL,
    "minimax-m2": THINK,
    "nemotron": THINK,
    "olmo3": THINK,
    "qwen3": THINK,
    "seed-oss": _SEED,
    "smollm3": THINK,
}
# What a template of the format says somewhere, the most telling first.
_SIGNS: tuple[tuple[str, ReasoningFormat], ...] = (
    ("<|channel|>analysis", HARMONY),
    ("<|channel>", _GEMMA),
    ("<|START_THINKING|>", _COMMAND),
    ("<seed:think>", _SEED),
    ("[THINK]", _MAGISTRAL),
    ("◁think▷", _KIMI_VL),
    ("Here is my thought process:", _GRANITE_IN_WORDS),
    ("</response>", _RESPONSE),
    ("</answer>", _ANSWER),
    ("<think>", THINK),
    ("</think>", THINK),
)


def find_reasoning(template: str | None, special_names: Collection[str]) -> ReasoningFormat | None:
    """The format of a model: as its template shows, else by the marks that are tokens of their own."""
    for sign, found in _SIGNS:
        if template is not None and sign in template and (found.answer is None or found.begin in template):
            return found
    by_tokens = (THINK, _MAGISTRAL, _SEED)
    return next((each for each in by_tokens if {each.begin, each.end} <= set(special_names)), None)
