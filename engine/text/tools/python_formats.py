"""The formats whose calls are Python's."""

from __future__ import annotations

from functools import partial

from engine.text.tools.json_formats import HERMES
from engine.text.tools.python_calls import PythonMarks, kept_python, read_python_calls
from engine.text.tools.tool_format import ToolFormat


def _format(marks: PythonMarks, *signs: tuple[str, ...]) -> ToolFormat:
    return ToolFormat(
        signs=signs,
        openings=marks.openings,
        marks=(*marks.openings, *marks.closings),
        read=partial(read_python_calls, marks),
        forced_as=HERMES,
        kept=partial(kept_python, marks),
    )


LFM2 = _format(
    PythonMarks(("<|tool_call_start|>",), ("<|tool_call_end|>",)),
    ("<|tool_list_start|>",),
    ("<|tool_call_start|>",),
)
LLAMA4 = _format(PythonMarks(("<|python_start|>",), ("<|python_end|>",), bare=True), ("<|python_start|>",))
GEMMA3 = _format(
    PythonMarks(("```tool_code", "```tool_call"), ("```",), bare=True),
    ("```tool_code",),
    ("```tool_call",),
    ("[func_name1(",),
)
