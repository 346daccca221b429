"""Renders chat messages to prompt text by the model's own template, in transformers' sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

from engine.errors import InvalidRequest, StartRefused

_MAX_REASON_CHARS = 100
_PROBE = ({"role": "user", "content": "Hello"},)


class ChatTemplate:
    """One Jinja template, from the model's files or from the operator, never from a request.

    It runs in transformers' immutable sandbox and sees messages as plain data. Any thread may render.
    Text that spells a special token becomes that token, in a message as in the template (vLLM does so too);
    a caller that wants user text to be inert has to refuse or rewrite it.
    """

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        """Takes `template`, else the transformers tokenizer's own. Raises StartRefused when it cannot run."""
        self._tokenizer = tokenizer
        self._template = template if template is not None else _own_template(tokenizer)
        if self._template is not None:
            self._probe()

    def __bool__(self) -> bool:
        """True when there is a template."""
        return self._template is not None

    @property
    def text(self) -> str | None:
        """The template itself; None without one."""
        return self._template

    def render(self, messages: Sequence[Mapping[str, object]]) -> str:
        """The prompt text, ending where the assistant's reply begins; raises InvalidRequest."""
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template: use /v1/completions, or start with --chat-template"
            )
        try:
            return self._apply(messages)
        except SecurityError as error:
            raise InvalidRequest("the chat template was stopped by its sandbox", param="messages") from error
        except TemplateError as error:
            reason = f"the chat template refused these messages: {_one_line(error)}"
            raise InvalidRequest(reason, param="messages") from error
        except Exception as error:  # templates run any expression: whatever they raise is about this input
            reason = f"the chat template cannot render these messages ({type(error).__name__})"
            raise InvalidRequest(reason, param="messages") from error

    def _apply(self, messages: Sequence[Mapping[str, object]]) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                list(messages), chat_template=self._template, add_generation_prompt=True, tokenize=False
            )
        )

    def _probe(self) -> None:
        """Compile now, so that a broken template stops the start and the first request does not wait."""
        try:
            self._apply(_PROBE)
        except TemplateSyntaxError as error:
            raise StartRefused(
                f"the chat template is broken at line {error.lineno}: {_one_line(error)}"
            ) from error
        except SecurityError as error:
            raise StartRefused(
                f"the chat template does what its sandbox forbids: {_one_line(error)}"
            ) from error
        except Exception:
            return  # it may well refuse this conversation and take others


def _own_template(tokenizer: Any) -> str | None:
    """The template among the model's files: the only one, or the one named default."""
    own = tokenizer.chat_template
    if isinstance(own, dict):
        own = own.get("default")
    return str(own) if own else None


def _one_line(error: Exception) -> str:
    """The error's text, on one line and of bounded length: templates may quote the whole input in it."""
    text = " ".join(str(error).split())
    return text if len(text) <= _MAX_REASON_CHARS else text[: _MAX_REASON_CHARS - 1] + "…"
