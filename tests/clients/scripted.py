"""ScriptedEngine: a model that does what a client's loop waits for. It calls the first tool, then answers."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine import CompiledGrammar, GenerationRequest, StructuredOutput
from tests.support import tool_templates
from tests.support.fake_engine import FakeEngine, FakeStream

ANSWER = "The answer is 42."
THOUGHT = "Let me see."
_PLAIN = {"integer": 42, "number": 42, "boolean": True, "null": None}
_DSPY = "[[ ## answer ## ]]"  # what dspy reads a field by


@dataclass
class ScriptedEngine(FakeEngine):
    """Thinks when it is asked to; behind a tool's result it answers, or calls what ends the client's loop."""

    max_model_len: int = 1 << 20
    tool_template: str | None = tool_templates.ALL["hermes"]
    reasoning: str = "qwen3"

    form: StructuredOutput | None = None  # of the reply to come

    async def render_chat(self, messages: Any, tools: Any = (), **more: Any) -> list[int]:
        self.form = None
        return await super().render_chat(messages, tools, **more)

    async def compile_grammar(
        self, structure: StructuredOutput, *, tenant: str | None = None
    ) -> CompiledGrammar:
        self.form = structure
        return await super().compile_grammar(structure, tenant=tenant)

    def submit(self, request: GenerationRequest) -> FakeStream:
        told = copy.copy(self)
        told.reply = self._reply()
        stream = FakeStream(told, request)
        self.requests.append(request)
        self.streams.append(stream)
        return stream

    def _reply(self) -> str:
        thought = f"<think>\n{THOUGHT}\n</think>\n\n" if self.options.get("enable_thinking") else ""
        if self.form is not None and self.form.frame is None and self.form.kind == "json_schema":
            return thought + json.dumps(sample(json.loads(self.form.source)))
        call = self._call()
        if call is not None:
            return f"{thought}<tool_call>\n{json.dumps(call)}\n</tool_call>"
        asked = " ".join(str(message["content"]) for message in self.messages)
        return f"{_DSPY}\n42\n\n[[ ## completed ## ]]" if _DSPY in asked else thought + ANSWER

    def _call(self) -> dict[str, Any] | None:
        """The call to make: none behind a result, but of a tool that is there to end with."""
        tools: Sequence[Any] = [tool["function"] for tool in self.tools]
        last = next((tool for tool in tools if tool["name"] == "final_answer"), None)
        newest = self.messages[-1]
        # smolagents tells what a tool gave as the user's words.
        has_result = newest["role"] == "tool" or str(newest["content"]).startswith("Observation:")
        tool = last if has_result else next((each for each in tools if each is not last), last)
        if tool is None:
            return None
        return {"name": tool["name"], "arguments": sample(tool["parameters"])}


def sample(schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> Any:
    """A value that follows a schema."""
    root = schema if root is None else root
    if "$ref" in schema:
        found: Any = root
        for step in schema["$ref"].removeprefix("#/").split("/"):
            found = found[step]
        return sample(found, root)
    for several in ("anyOf", "oneOf", "allOf"):
        if schema.get(several):
            return sample(schema[several][0], root)
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    if schema.get("type") == "object":
        return {name: sample(each, root) for name, each in schema.get("properties", {}).items()}
    if schema.get("type") == "array":
        return [sample(schema["items"], root)] if "items" in schema else []
    return _PLAIN.get(schema.get("type", "string"), "Paris")
