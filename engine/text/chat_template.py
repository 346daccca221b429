"""Renders chat messages to prompt text by the model's own template, in a sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jinja2 import Environment, Template
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

from engine.errors import InvalidRequest, StartRefused, TemplateStopped
from engine.text.template_sandbox import TemplateSandbox
from engine.text.tools.plain_template import (
    mentions_tools,
    plain_messages,
    ways_to_show,
    with_quoted_arguments,
)
from engine.text.tools.single_calls import one_call_each

_MAX_REASON_CHARS = 100
_PROBE_TEXT = "Hello 7391"  # which no template says itself
_PROBE = ({"role": "user", "content": _PROBE_TEXT},)


class ChatTemplate:
    """One Jinja template, from the model's files or from the operator, never from a request.

    It runs in a sandbox with limits and sees messages as plain data. Any thread may render.
    Text that spells a special token becomes that token, in a message as in the template (vLLM does so too);
    a caller that wants user text to be inert has to refuse or rewrite it.
    """

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        """Takes `template`, else the transformers tokenizer's own. Raises StartRefused when it cannot run."""
        self._special_tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        self._sandbox = TemplateSandbox()
        self._compiled: dict[str, Template] = {}
        self._of_parts: set[str] = set()  # templates that show no text but that of parts
        self._template = template if template is not None else _own_template(tokenizer, "default")
        self._tool_template: str | None = None
        if self._template is not None:
            self._compile(self._template)
            self._probe()
            for_tools = self._template if template is not None else _own_template(tokenizer, "tool_use")
            self._tool_template = for_tools if for_tools is not None and _reads_tools(for_tools) else None
            if self._tool_template is not None:
                self._compile(self._tool_template)
            self._of_parts.update(filter(self._wants_parts, self._compiled))

    def __bool__(self) -> bool:
        """True when there is a template."""
        return self._template is not None

    @property
    def text(self) -> str | None:
        """The template itself; None without one."""
        return self._template

    @property
    def tool_text(self) -> str | None:
        """The template that shows tools to the model; None if there is none that does."""
        return self._tool_template

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] = (),
        options: Mapping[str, object] = MappingProxyType({}),
    ) -> str:
        """The prompt text, ending where the assistant's reply begins; raises InvalidRequest.

        `tools` are OpenAI's definitions; a template that takes none gets them in messages. `options` are
        further variables that the template may read, such as `enable_thinking`; they replace no other.
        """
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template: use /v1/completions, or start with --chat-template"
            )
        try:
            if self._tool_template is None and (tools or mentions_tools(messages)):
                return self._apply_plain(plain_messages(messages, tools), options)
            return self._apply_any_calls(messages, tools, options)
        except SecurityError as error:
            raise TemplateStopped("the chat template was stopped by its sandbox", param="messages") from error
        except TemplateError as error:
            reason = f"the chat template refused these messages: {_one_line(error)}"
            raise InvalidRequest(reason, param="messages") from error
        except Exception as error:  # templates run any expression: whatever they raise is about this input
            reason = f"the chat template cannot render these messages ({type(error).__name__})"
            raise InvalidRequest(reason, param="messages") from error

    def _apply_any_calls(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]],
        options: Mapping[str, object],
    ) -> str:
        """With parallel calls as they are; one after the other for a template that takes one a message."""
        try:
            return self._apply_any_arguments(messages, tools, options)
        except SecurityError:
            raise
        except TemplateError:
            apart = one_call_each(messages)
            if len(apart) == len(messages):
                raise
            return self._apply_any_arguments(apart, tools, options)

    def _apply_any_arguments(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]],
        options: Mapping[str, object],
    ) -> str:
        """With the arguments of calls as objects; as text for a template that joins them to other text."""
        try:
            return self._apply(messages, tools, options)
        except TypeError:
            if not any(message.get("tool_calls") for message in messages):
                raise
            return self._apply([with_quoted_arguments(message) for message in messages], tools, options)

    def _apply_plain(self, messages: Sequence[Mapping[str, object]], options: Mapping[str, object]) -> str:
        """Tools as text, for a template that knows none.

        Some templates know no system message either, or no two messages of the user in a row.
        """
        refusal: TemplateError | None = None
        for shown in ways_to_show(messages):
            try:
                return self._apply(shown, (), options)
            except SecurityError:
                raise
            except TemplateError as error:
                refusal = error
        assert refusal is not None
        raise refusal

    def _apply(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] = (),
        options: Mapping[str, object] = MappingProxyType({}),
    ) -> str:
        # Only a model with templates of both kinds has one for conversations whose tools are gone.
        calls_tools = tools or any(message.get("tool_calls") for message in messages)
        template = (calls_tools and self._tool_template) or self._template
        assert template is not None
        return self._render(template, messages, tools, options)

    def _render(
        self,
        template: str,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] = (),
        options: Mapping[str, object] = MappingProxyType({}),
    ) -> str:
        shown = map(_in_parts, messages) if template in self._of_parts else messages
        return self._sandbox.render(
            self._compiled[template],
            {
                **options,
                **self._special_tokens,
                "messages": [{**message} for message in shown],
                "tools": list(tools) or None,
                "documents": None,
                "add_generation_prompt": True,
            },
        )

    def _compile(self, template: str) -> None:
        """Now, so that a broken template stops the start and the first request does not wait."""
        try:
            self._compiled[template] = self._sandbox.compiled(template)
        except TemplateSyntaxError as error:
            raise StartRefused(
                f"the chat template is broken at line {error.lineno}: {_one_line(error)}"
            ) from error
        except Exception as error:  # such as nesting deeper than its parser goes
            raise StartRefused(f"the chat template cannot be compiled: {_one_line(error)}") from error

    def _probe(self) -> None:
        """Render once, so that what no request could use stops the start."""
        try:
            self._apply(_PROBE)
        except SecurityError as error:
            raise StartRefused(
                f"the chat template does what its sandbox forbids: {_one_line(error)}"
            ) from error
        except Exception:
            return  # it may well refuse this conversation and take others

    def _wants_parts(self, template: str) -> bool:
        """True for one of a model that sees as well: it leaves out a text that is no list of parts."""
        return not self._shows(template, _PROBE) and self._shows(template, list(map(_in_parts, _PROBE)))

    def _shows(self, template: str, messages: Sequence[Mapping[str, object]]) -> bool:
        try:
            return _PROBE_TEXT in self._render(template, messages)
        except Exception:  # it may well refuse this conversation and take others
            return False


def _in_parts(message: Mapping[str, object]) -> Mapping[str, object]:
    """The message with its text as the only part of its content."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _own_template(tokenizer: Any, name: str) -> str | None:
    """The template among the model's files: the only one, or the one of this name, or the default one."""
    own = tokenizer.chat_template
    if isinstance(own, dict):
        own = own.get(name) or own.get("default")
    return str(own) if own else None


def _reads_tools(template: str) -> bool:
    """True when the template uses the variable `tools`; it need not compile."""
    before = ""
    try:
        for _, kind, token in Environment(autoescape=True).lex(template):
            if kind == "name" and token == "tools" and before != ".":
                return True
            before = before if kind == "whitespace" else token
    except TemplateError:
        pass
    return False


def _one_line(error: Exception) -> str:
    """The error's text, on one line and of bounded length: templates may quote the whole input in it."""
    text = " ".join(str(error).split())
    return text if len(text) <= _MAX_REASON_CHARS else text[: _MAX_REASON_CHARS - 1] + "…"
