"""The tools of a response and the choice among them, as clients write them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Discriminator, Field, Tag

from server.api.extra_fields import MAX_DESCRIPTION
from server.api.openai.protocol_tools import MAX_TOOLS, LongName, Parameters
from server.api.openai.protocol_values import MAX_SCHEMA_CHARS, BodyPart, refuse, type_of

Description = Annotated[str, Field(max_length=MAX_DESCRIPTION)]


class FunctionTool(BodyPart):
    """A function that the model may call."""

    type: Literal["function"]
    """Always `function`."""
    name: LongName
    """The function's name."""
    description: Description | None = None
    """What the function does; the model reads it."""
    parameters: Parameters | None = None
    """The JSON schema of its arguments, an object. Left out: it takes none."""
    strict: bool | None = None
    """Whether all calls match `parameters`, those that the model makes of its own accord, too."""


class InputFormat(BodyPart):
    """What the input of a custom tool is: any text, or text by a grammar."""

    type: Literal["text", "grammar"]
    """`text` is any text."""
    syntax: Literal["lark", "regex"] | None = None
    """What `definition` is written in. Only a regular expression binds calls, and only forced ones; the
    model is shown either."""
    definition: Annotated[str, Field(max_length=MAX_SCHEMA_CHARS)] | None = None
    """The grammar of the input."""


class CustomTool(BodyPart):
    """A tool whose input is text."""

    type: Literal["custom"]
    """Always `custom`."""
    name: LongName
    """The tool's name."""
    description: Description | None = None
    """What the tool does; the model reads it."""
    format: InputFormat | None = None
    """What its input is. Left out: any text."""


class HostedTool(BodyPart):
    """A tool that OpenAI runs itself, or a kind that nobody knows: no model here can call it."""

    type: Annotated[str, Field(max_length=128)]
    """The tool's type, which the header `x-slipstream-ignored` names."""


def _tool_tag(value: object) -> str:
    kind = type_of(value)
    return f"<{kind}>" if kind in ("function", "custom", "namespace") else "<hosted>"


def _callable_tag(value: object) -> str:
    kind = type_of(value)
    return f"<{kind}>" if kind in ("function", "custom") else "<hosted>"


CallableTool: TypeAlias = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[CustomTool, Tag("<custom>")]
    | Annotated[HostedTool, Tag("<hosted>")],
    Discriminator(_callable_tag),
]


class NamespaceTool(BodyPart):
    """Tools that share a name before their own."""

    type: Literal["namespace"]
    """Always `namespace`."""
    name: LongName
    """What comes before the names of its tools."""
    description: Description | None = None
    """What its tools have in common; the model reads it."""
    tools: Annotated[list[CallableTool], Field(max_length=MAX_TOOLS, fail_fast=True)]
    """The tools of the group."""


ResponseTool: TypeAlias = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[CustomTool, Tag("<custom>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[HostedTool, Tag("<hosted>")],
    Discriminator(_tool_tag),
]


class NamedTool(BodyPart):
    """One tool, by its type and name."""

    type: Literal["function", "custom"]
    """The tool's type."""
    name: str
    """One of `tools`."""


class AllowedTools(BodyPart):
    """Some of the tools, which alone may be called."""

    type: Literal["allowed_tools"]
    """Always `allowed_tools`."""
    mode: Literal["auto", "required"]
    """Whether one of them must be called."""
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)]
    """Their types and names."""


class HostedChoice(BodyPart):
    """A choice of a tool that OpenAI runs."""

    type: Annotated[str, Field(max_length=128)]
    """A tool that this server does not run: refused."""


def _no_hosted(choice: HostedChoice) -> HostedChoice:
    refuse("asks for a tool that this server does not run")


def _choice_tag(value: object) -> str:
    kind = type_of(value)
    if isinstance(value, str):
        return "<word>"
    if kind in ("function", "custom"):
        return "<named>"
    return "<allowed>" if kind == "allowed_tools" else "<hosted>"


ToolChoice: TypeAlias = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedTool, Tag("<named>")]
    | Annotated[AllowedTools, Tag("<allowed>")]
    | Annotated[HostedChoice, AfterValidator(_no_hosted), Tag("<hosted>")],
    Discriminator(_choice_tag),
]

Tools: TypeAlias = Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)]
