"""The formats whose calls are a name behind a mark and then a JSON object."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from engine.text.tools.headed_calls import HeadMarks, kept_headed, read_headed_calls
from engine.text.tools.json_formats import HERMES, mistral_id
from engine.text.tools.tool_format import ToolFormat

_ANY_NAME = re.compile(r"([\w.\-]+)")


def _format(
    marks: HeadMarks,
    *signs: tuple[str, ...],
    shown_id: Callable[[str], str] = str,
    id_of: Callable[[str, int], str] | None = None,
) -> ToolFormat:
    return ToolFormat(
        signs=signs,
        openings=marks.openings,
        marks=marks.marks,
        read=partial(read_headed_calls, marks),
        forced_as=HERMES,
        kept=partial(kept_headed, marks),
        shown_id=shown_id,
        id_of=id_of,
    )


_SEPARATOR = "<｜tool▁sep｜>"
_CALLS = "<｜tool▁calls▁begin｜>"
DEEPSEEK_V3 = _format(
    HeadMarks(
        "<｜tool▁call▁begin｜>",
        ("```json",),
        re.compile(rf"(?:function)?{re.escape(_SEPARATOR)}([\w.\-]+)"),
        (f"function{_SEPARATOR}NAME\n```json\n", "\n```<｜tool▁call▁end｜>"),
        (_CALLS, "```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    ),
    (_CALLS, "```json"),
)
DEEPSEEK_V31 = _format(
    HeadMarks(
        "<｜tool▁call▁begin｜>",
        (_SEPARATOR,),
        _ANY_NAME,
        (f"NAME{_SEPARATOR}", "<｜tool▁call▁end｜>"),
        (_CALLS, "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    ),
    (_CALLS,),
)
KIMI_K2 = _format(
    HeadMarks(
        "<|tool_call_begin|>",
        ("<|tool_call_argument_begin|>",),
        re.compile(r"(?:functions\.)?([\w.\-]+?)(?::\d+)?"),
        ("functions.NAME:NUMBER<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ("<|tool_calls_section_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"),
    ),
    ("<|tool_calls_section_begin|>",),
    ("<|im_system|>tool_declare",),
    id_of="functions.{}:{}".format,
)
MISTRAL_NAMED = _format(
    HeadMarks(
        "[TOOL_CALLS]",
        ("[ARGS]", "{"),
        re.compile(r"([\w.\-]+?)(?:\[CALL_ID\]\w*)?"),
        ("NAME[ARGS]", ""),
    ),
    ("[TOOL_CALLS]", "[ARGS]"),
    shown_id=mistral_id,
)
