"""What a chat request shows to the model: its messages, tools and options as a chat template takes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine import (
    ContextLengthExceeded,
    Engine,
    InvalidRequest,
    ReplyFormat,
    TemplateStopped,
    ToolRules,
    joined_users,
    one_call_each,
)
from server.api.openai.protocol import ChatCompletionRequest, ChatMessage
from server.api.openai.protocol_tools import ToolCall
from server.http.errors import invalid

# What the templates of gpt-oss know; others take no word, or any.
_HARMONY_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}


@dataclass(frozen=True, slots=True)
class ChatInput:
    """The part of a request that a chat template shows.

    With `bends`, a template that refuses system messages behind the first is shown them as the user's, and
    one that refuses several messages of the user in a row, or one behind a tool's result, is shown them as
    one, or behind an answer that says nothing.
    """

    messages: list[dict[str, object]]
    tools: Sequence[dict[str, object]]
    options: Mapping[str, object]
    bends: bool = False

    async def render(self, engine: Engine, *, add_special_tokens: bool, tenant: str | None) -> list[int]:
        """The prompt, as tokens. Raises InvalidRequest for what the template refuses."""
        refusal: InvalidRequest | None = None
        for messages in self._shown():
            try:
                return await engine.text.render_chat(
                    messages,
                    self.tools,
                    options=self.options,
                    add_special_tokens=add_special_tokens,
                    tenant=tenant,
                )
            except (ContextLengthExceeded, TemplateStopped):
                raise
            except InvalidRequest as error:
                refusal = error
        assert refusal is not None
        raise refusal

    def _shown(self) -> Iterator[list[dict[str, object]]]:
        """The messages, and what is tried in their place where the template refuses them."""
        yield self.messages
        if not self.bends:
            return
        bent = [self.messages[0], *map(_not_of_system, self.messages[1:])]
        if bent != self.messages:
            yield bent
        joined = joined_users(bent)
        if len(joined) < len(bent):
            yield joined
        answered = list(_answered(joined))
        if len(answered) > len(joined):
            yield answered


def _not_of_system(message: dict[str, object]) -> dict[str, object]:
    return {**message, "role": "user"} if message["role"] == "system" else message


def _answered(messages: list[dict[str, object]]) -> Iterator[dict[str, object]]:
    """The same with an answer between each result and what the user says behind it."""
    before: object = None
    for message in messages:
        if before == "tool" and message["role"] == "user":
            yield {"role": "assistant", "content": " "}  # some templates refuse an empty one
        yield message
        before = message["role"]


def chat_input(body: ChatCompletionRequest, tools: ToolRules | None, form: ReplyFormat) -> ChatInput:
    """What `body` shows to a model of this format. Raises ApiError for what it could not be shown."""
    return ChatInput(
        messages_for_template(body.messages, form),
        () if tools is None else [tool.for_template() for tool in tools.tools],
        template_options(body, form),
        body.bends_roles,
    )


def template_options(body: ChatCompletionRequest, form: ReplyFormat) -> dict[str, object]:
    """The template's own variables: those given by name, then those that other fields stand for."""
    options: dict[str, object] = dict(body.chat_template_kwargs or {})
    thinks = body.enable_thinking
    if body.reasoning_effort is not None:
        effort = body.reasoning_effort
        has_levels = form.reasoning is not None and form.reasoning.has_channels
        options["reasoning_effort"] = _HARMONY_EFFORTS.get(effort, effort) if has_levels else effort
        thinks = effort != "none" if thinks is None else thinks
    if body.verbosity is not None:
        options["verbosity"] = body.verbosity
    if thinks is not None:  # templates know either name
        options.update(enable_thinking=thinks, thinking=thinks)
    return options


def may_think(options: Mapping[str, object]) -> bool:
    """False where a request says that the model is not to think."""
    return options.get("enable_thinking") is not False


def messages_for_template(messages: Sequence[ChatMessage], form: ReplyFormat) -> list[dict[str, object]]:
    """What the chat template sees of a conversation. Raises ApiError for what it could not be shown."""
    shown = (_message(i, message, form) for i, message in enumerate(messages))
    found = _with_older_calls(messages, shown, form)
    found = _with_made_ids(_with_names(found) if form.tools.names_results else found, form)
    return one_call_each(found) if form.tools.shows_one else found


def _with_names(messages: list[dict[str, object]]) -> list[dict[str, object]]:
    """The same with the tool's name beside each result, for which clients send the id of its call."""
    names: dict[object, object] = {}
    for message in messages:
        calls: Any = message.get("tool_calls") or ()
        names.update((call.get("id"), call["function"]["name"]) for call in calls)
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message.setdefault("name", names[message["tool_call_id"]])
    return messages


def _with_made_ids(messages: list[dict[str, object]], form: ReplyFormat) -> list[dict[str, object]]:
    """The same with the ids that templates show in place of a tool's name, where this model's do."""
    id_of = form.tools.id_of
    if id_of is None:
        return messages
    made: dict[object, str] = {}
    num_calls = 0
    for message in messages:
        calls: Any = message.get("tool_calls") or ()
        for call in calls:
            call_id = id_of(call["function"]["name"], num_calls)
            made[call.get("id")] = call["id"] = call_id
            num_calls += 1
        if (answered := message.get("tool_call_id")) is not None:
            message["tool_call_id"] = made.get(answered, answered)
    return messages


def _with_older_calls(
    messages: Sequence[ChatMessage], shown: Iterable[dict[str, object]], form: ReplyFormat
) -> list[dict[str, object]]:
    """The same with calls and results of the older kind as the newer one, with ids from their place."""
    found, call_id = [], form.tools.shown_id("call_function_0")
    for i, (message, entry) in enumerate(zip(messages, shown, strict=True)):
        if message.function_call is not None and message.role == "assistant":
            call_id = form.tools.shown_id(f"call_function_{i}")
            call = ToolCall(function=message.function_call, id=call_id)
            entry["tool_calls"] = [call.for_template()]
        elif message.role == "function":
            entry |= {"role": "tool", "tool_call_id": call_id}
        found.append(entry)
    return found


def _message(index: int, message: ChatMessage, form: ReplyFormat) -> dict[str, object]:
    if message.tool_calls and message.role != "assistant":
        name = f"messages[{index}].tool_calls"
        raise invalid(f"'{name}' is out of place: only an assistant's message may have calls.", name)
    if message.content is None and message.role not in ("assistant", "tool", "function"):
        name = f"messages[{index}].content"
        raise invalid(f"'{name}' is missing: only an assistant's or a tool's message may have none.", name)
    if message.role == "tool" and not message.tool_call_id:
        name = f"messages[{index}].tool_call_id"
        raise invalid(f"'{name}' is missing: a tool's message names the call that it answers.", name)
    # Templates know the older name of the role.
    shown: dict[str, object] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.content or "",
    }
    if message.name is not None:
        shown["name"] = message.name
    if message.tool_call_id is not None:
        shown["tool_call_id"] = form.tools.shown_id(message.tool_call_id)
    if message.tool_calls:
        shown["tool_calls"] = [_with_shown_id(call.for_template(), form) for call in message.tool_calls]
    if message.role == "assistant" and message.thought:
        shown |= _thought(message, form)
    return shown


def _thought(message: ChatMessage, form: ReplyFormat) -> dict[str, object]:
    """Earlier reasoning under the names that templates read it by."""
    if form.reasoning is not None and form.reasoning.has_channels:
        # They refuse it beside content, for it is told as what was said before a call.
        return {} if message.content and message.tool_calls else {"thinking": message.thought}
    return dict.fromkeys(("reasoning_content", "reasoning", "thinking"), message.thought)


def _with_shown_id(call: dict[str, Any], form: ReplyFormat) -> dict[str, Any]:
    return {**call, "id": form.tools.shown_id(call["id"])} if "id" in call else call
