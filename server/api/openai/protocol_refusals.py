"""Request fields that are known and not honoured: refused by name, for a client must not get less than asked.

A field that lands leaves its line here. Harmless values, which ask for nothing, pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from server.http.errors import invalid


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a field is refused; `harmless` are the values that change nothing."""

    message: str
    harmless: tuple[object, ...] = ()


def _never(name: str, *harmless: object, hint: str = "") -> tuple[str, Refusal]:
    return name, Refusal(f"'{name}' is not supported{hint}.", harmless)


_USE_STRUCTURED = ": see 'structured_outputs'"

ON_BOTH: Mapping[str, Refusal] = dict(
    (
        _never("prompt_embeds"),
        _never("use_beam_search", False),
        _never("logits_processors", []),
        _never("logprob_token_ids", []),
        _never("repetition_detection"),
        _never("truncation_side", "left"),
        *(
            _never(f"guided_{kind}", hint=_USE_STRUCTURED)
            for kind in ("json", "regex", "choice", "grammar", "decoding_backend", "whitespace_pattern")
        ),
    )
)
ON_COMPLETIONS: Mapping[str, Refusal] = {
    **ON_BOTH,
    **dict((_never("thinking_token_budget", hint=": there is no chat to think in"),)),
}
ON_CHAT: Mapping[str, Refusal] = {
    **ON_BOTH,
    **dict(
        (
            _never("add_generation_prompt", True),
            _never("audio"),
            _never("chat_template", hint=": the server's own template is used"),
            _never("continue_final_message", False),
            _never("documents", []),
            _never("echo", False),
            _never("modalities", ["text"]),
            _never("moderation"),
            _never("web_search_options"),
        )
    ),
}


_TEMPLATE_FIELDS = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "documents",
)
ON_TOKENIZE: Mapping[str, Refusal] = {name: ON_CHAT[name] for name in _TEMPLATE_FIELDS if name in ON_CHAT}


def check_refusals(body: Mapping[str, object], refusals: Mapping[str, Refusal]) -> None:
    """Raise ApiError for the first field of `body` that asks for something in `refusals`."""
    for name, refusal in refusals.items():
        value = body.get(name)
        if value is not None and not any(_same(value, harmless) for harmless in refusal.harmless):
            raise invalid(refusal.message, name)


def _same(value: object, harmless: object) -> bool:
    """Equality in JSON's sense: true is not 1."""
    return type(value) is type(harmless) and value == harmless
