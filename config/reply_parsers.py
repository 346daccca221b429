"""How models may write reasoning and tool calls: the names that --reasoning-parser and its like take."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from config.value_types import Shape, lower_case

REASONING_PARSERS = (
    *("command-a", "deepseek-r1", "deepseek-v3", "ernie45", "gemma4", "glm45", "gpt-oss", "granite"),
    *("granite33", "hunyuan-a13b", "kimi-k2", "kimi-vl", "magistral", "minimax-m2", "nemotron", "olmo3"),
    *("qwen3", "seed-oss", "smollm3"),
)
TOOL_CALL_PARSERS = (
    *("deepseek-v3", "deepseek-v31", "functiongemma", "gemma3", "gemma4", "glm45", "gpt-oss", "granite"),
    *("hermes", "kimi-k2", "lfm2", "llama3", "llama4", "minimax-m2", "mistral", "mistral-named"),
    *("nemotron", "phi4-mini", "qwen3-coder", "seed-oss"),
)


def _known_name(value: str, *allowed: str) -> str:
    """People write underscores, as other servers do. Raises ValueError for a name that is not known."""
    name = value.replace("_", "-")
    if name not in allowed:
        raise ValueError("not a known name")
    return name


ReasoningParser = Annotated[
    str,
    BeforeValidator(lower_case),
    AfterValidator(lambda value: _known_name(value, "auto", "none", *REASONING_PARSERS)),
    Shape("NAME", f"auto, none, {', '.join(REASONING_PARSERS)}"),
]
ToolCallParser = Annotated[
    str,
    BeforeValidator(lower_case),
    AfterValidator(lambda value: _known_name(value, "auto", *TOOL_CALL_PARSERS)),
    Shape("NAME", f"auto, {', '.join(TOOL_CALL_PARSERS)}"),
]
