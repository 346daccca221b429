"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine import Engine, OutputDelta, TokenLogprobs
from server.api.body import read_request
from server.api.generation import Choice, Generation, Prompt
from server.api.openai.logprobs import TokenSpelling, chat_logprobs, prompt_logprobs
from server.api.openai.models import check_model
from server.api.openai.protocol import ChatCompletionRequest
from server.api.openai.protocol_refusals import ON_CHAT
from server.api.openai.reply import Collected, Reply, finish_fields, fresh_id
from server.api.openapi import json_body
from server.api.submission import Submission, open_generation, truncated
from server.api.tools.history import Conversation, messages_for_template, tool_template
from server.api.tools.message import ToolReply
from server.api.tools.turn import ToolTurn, check_tool_fields, read_tools
from server.http.body_room import lease_of
from server.http.context import context_of, exchange_of
from server.http.errors import invalid

router = APIRouter(tags=["generation"])


@router.post("/v1/chat/completions", openapi_extra=json_body(ChatCompletionRequest))
async def create_chat_completion(request: Request) -> Response:
    """Write the assistant's next message."""
    reply, generation = await open_chat(request)
    return await reply.respond(generation)


async def open_chat(request: Request) -> tuple[Reply, Generation]:
    """The generation that a request asks for, and what replies with it. What came with it ends here.

    Only its tools live on. Raises ApiError or an EngineError.
    """
    context = context_of(request)
    body = await read_request(request, ChatCompletionRequest, ON_CHAT)
    check_model(context, body.model)
    check_tool_fields(body)
    template = tool_template(Conversation(body.messages, body.tools), context.engine)
    messages = messages_for_template(body.messages, template)
    tools = read_tools(body, template)
    if tools is not None:
        body.skip_special_tokens = False  # what marks a call may be one
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("'top_logprobs' needs 'logprobs': true.", "top_logprobs")

    exchange = exchange_of(request.scope)

    async def prepare(engine: Engine) -> list[Prompt]:
        token_ids = await engine.render_chat(
            messages,
            () if tools is None else tools.for_template,
            add_special_tokens=bool(body.add_special_tokens),
            tenant=exchange.tenant,
        )
        return [Prompt(truncated(body, token_ids, engine.info))]

    shape = ChatShape(body, TokenSpelling.of(context.engine, body), tools)
    structure = None if tools is None else tools.structure()
    lease = lease_of(request.scope)
    submission = Submission(
        reply_id=fresh_id(shape),
        body=body,
        num_prompts=1,
        prepare=prepare,
        exchange=exchange,
        lease=lease,
        structure=structure,
        held_bytes=0 if tools is None else lease.num_bytes,
    )
    reply = Reply(context, body, shape, submission.reply_id)
    return reply, await open_generation(context, submission)


@dataclass(frozen=True, slots=True)
class ChatShape:
    """OpenAI's chat.completion objects."""

    body: ChatCompletionRequest
    spelling: TokenSpelling
    tools: ToolTurn | None = None  # None: what the model writes is text
    _replies: dict[int, ToolReply] = field(default_factory=dict, init=False)  # by choice, in a stream

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def chunks(self, choice: Choice, delta: OutputDelta) -> Iterator[dict[str, object]]:
        """The role with the first token, then text, then an empty delta with the end."""
        if not choice.started:
            choice.started = True
            opening = self._chunk(choice, {"role": "assistant", "content": ""})
            if self.body.return_token_ids:
                opening["prompt_token_ids"] = list(choice.prompt.token_ids)
            yield {**opening, **self._prompt_logprobs(choice)}
        parts = self._parts(choice, delta)
        if not parts and (delta.logprobs or (self.body.return_token_ids and delta.token_ids)):
            parts = [{"content": ""}]
        for i, part in enumerate(parts):
            yield self._chunk(choice, part, None if i else delta)
        if delta.finish is not None:
            reply = self._replies.get(choice.index)
            ending = {"index": choice.index, "delta": {}, "logprobs": None, **_ending(choice, reply)}
            yield {"choices": [ending]}

    def _parts(self, choice: Choice, delta: OutputDelta) -> list[dict[str, object]]:
        """What the message grows by; with tools nothing, while the text may yet be part of a call."""
        if self.tools is None:
            return [{"content": delta.text}] if delta.text else []
        reply = self._replies.get(choice.index)
        if reply is None:
            reply = self._replies[choice.index] = ToolReply(self.tools)
        return reply.read(delta.text, ended=delta.finish is not None)

    def _chunk(
        self, choice: Choice, message: dict[str, object], delta: OutputDelta | None = None
    ) -> dict[str, object]:
        entry = {
            "index": choice.index,
            "delta": message,
            "logprobs": None if delta is None else self._logprobs(delta.logprobs),
            "finish_reason": None,
        }
        if delta is not None and self.body.return_token_ids:
            entry["token_ids"] = list(delta.token_ids)
        return {"choices": [entry]}

    def choice(self, choice: Choice, output: Collected) -> dict[str, object]:
        """The whole choice."""
        text = "".join(output.text)
        reply = None if self.tools is None else ToolReply(self.tools)
        message = {"role": "assistant", "content": text, "refusal": None}
        entry = {
            "index": choice.index,
            "message": message if reply is None else {**message, **reply.whole(text)},
            "logprobs": self._logprobs(output.logprobs),
            **_ending(choice, reply),
        }
        if self.body.return_token_ids:
            entry["token_ids"] = output.token_ids
        return entry

    def extras(self, choices: list[Choice]) -> dict[str, object]:
        """What the reply says of the prompt, which all choices share."""
        extras = self._prompt_logprobs(choices[0])
        if self.body.return_token_ids:
            extras["prompt_token_ids"] = list(choices[0].prompt.token_ids)
        return extras

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, object] | None:
        return chat_logprobs(logprobs, self.spelling) if self.body.logprobs else None

    def _prompt_logprobs(self, choice: Choice) -> dict[str, object]:
        scores, number = choice.prompt.scores, self.body.prompt_logprobs
        if number is None or scores is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(scores.records, number, self.spelling.text)}


def _ending(choice: Choice, reply: ToolReply | None) -> dict[str, object]:
    """How the choice ended: with calls, if it did not end before its time."""
    fields = finish_fields(choice)
    if reply is not None and reply.ends_with_calls and fields["finish_reason"] == "stop":
        fields["finish_reason"] = "tool_calls"
    return fields
