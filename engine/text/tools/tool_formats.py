"""Which format a chat template asks the model to write its calls in."""

from __future__ import annotations

from engine.text.tools.braced_calls import FUNCTION_GEMMA, GEMMA4
from engine.text.tools.channel_calls import CHANNELS
from engine.text.tools.headed_formats import DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2, MISTRAL_NAMED
from engine.text.tools.json_formats import GRANITE, HERMES, LLAMA3, MISTRAL, NEMOTRON, PHI4_MINI
from engine.text.tools.python_formats import GEMMA3, LFM2, LLAMA4
from engine.text.tools.tagged_formats import GLM45, MINIMAX, QWEN3_CODER, SEED_OSS
from engine.text.tools.tool_format import ToolFormat

# The most telling first: some write the same mark around something else.
TOOL_FORMATS: dict[str, ToolFormat] = {
    "gpt-oss": CHANNELS,
    "seed-oss": SEED_OSS,
    "qwen3-coder": QWEN3_CODER,
    "glm45": GLM45,
    "minimax-m2": MINIMAX,
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v31": DEEPSEEK_V31,
    "kimi-k2": KIMI_K2,
    "gemma4": GEMMA4,
    "functiongemma": FUNCTION_GEMMA,
    "lfm2": LFM2,
    "llama4": LLAMA4,
    "phi4-mini": PHI4_MINI,
    "mistral-named": MISTRAL_NAMED,
    "mistral": MISTRAL,
    "nemotron": NEMOTRON,
    "granite": GRANITE,
    "hermes": HERMES,
    "llama3": LLAMA3,
    "gemma3": GEMMA3,
}


def find_tools(template: str) -> ToolFormat | None:
    """The format of a template that takes tools; None if it is none of those known here."""
    return next((each for each in TOOL_FORMATS.values() if each.is_of(template)), None)
