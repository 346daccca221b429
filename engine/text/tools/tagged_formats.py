"""The formats whose calls have their arguments between tags."""

from __future__ import annotations

from functools import partial

from engine.text.tools.json_formats import HERMES
from engine.text.tools.tagged_calls import Tags, kept_tagged, read_tagged_calls
from engine.text.tools.tool_format import ToolFormat


def _format(tags: Tags, *signs: tuple[str, ...]) -> ToolFormat:
    return ToolFormat(
        signs=signs,
        openings=tags.openings,
        marks=tags.marks,
        read=partial(read_tagged_calls, tags),
        forced_as=HERMES,
        kept=partial(kept_tagged, tags),
    )


QWEN3_CODER = _format(
    Tags(
        ("<tool_call>", "</tool_call>"),
        ("<function=", ">"),
        "</function>",
        ("<parameter=", ">"),
        ("", "</parameter>"),
    ),
    ("<function=", "<parameter="),
)
SEED_OSS = _format(
    Tags(
        ("<seed:tool_call>", "</seed:tool_call>"),
        ("<function=", ">"),
        "</function>",
        ("<parameter=", ">"),
        ("", "</parameter>"),
    ),
    ("<seed:tool_call>",),
)
GLM45 = _format(
    Tags(
        None,
        ("<tool_call>", "\n"),
        "</tool_call>",
        ("<arg_key>", "</arg_key>"),
        ("<arg_value>", "</arg_value>"),
    ),
    ("<arg_key>",),
)
MINIMAX = _format(
    Tags(
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        ('<invoke name="', '">'),
        "</invoke>",
        ('<parameter name="', '">'),
        ("", "</parameter>"),
    ),
    ("<minimax:tool_call>",),
)
