"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine import Engine, OutputDelta, ReplyFormat, TokenLogprobs, ToolRules, owned_salt
from server.api.body import read_request
from server.api.generation import Choice, Generation, Prompt
from server.api.next_turns import Chat
from server.api.off_loop import off_loop
from server.api.openai.chat_input import ChatInput, chat_input, may_think
from server.api.openai.chat_tools import read_tools
from server.api.openai.logprobs import TokenSpelling, chat_logprobs, prompt_logprobs
from server.api.openai.message import deltas_of, message_of
from server.api.openai.models import check_model
from server.api.openai.protocol import ChatCompletionRequest
from server.api.openai.protocol_refusals import ON_CHAT
from server.api.openai.reply import Collected, Reply, finish_fields, fresh_id, tells_tokens, token_fields
from server.api.openapi import json_body
from server.api.reply_rules import ReplyRules
from server.api.submission import Submission, open_generation, truncated
from server.http.body_room import lease_of
from server.http.context import cache_owner, context_of, exchange_of
from server.http.errors import invalid

router = APIRouter(tags=["generation"])

_EXAMPLE = {
    "messages": [{"role": "user", "content": "Name three rivers."}],
    "temperature": 0.2,
    "max_tokens": 60,
}


@router.post("/v1/chat/completions", openapi_extra=json_body(ChatCompletionRequest, _EXAMPLE))
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
    spelling = TokenSpelling.of(context.engine, body)
    shape = ChatShape(body, spelling, is_named=_is_named(body), is_legacy=bool(body.functions))
    reply_id = fresh_id(shape)
    reply = Reply(context, body, shape, reply_id)
    return reply, await open_chat_body(request, body, reply_id)


async def open_chat_body(
    request: Request,
    body: ChatCompletionRequest,
    reply_id: str,
    *,
    echoes: bool = False,
    past_bytes: int = 0,
) -> Generation:
    """The generation that a chat's body asks for, by whichever API it came; `reply_id` is fresh.

    Each choice has a `reader` for the pieces of its reply. `echoes` says that the reply holds parts of the
    request, whose memory then counts until its end; `past_bytes` are those of what came before it.
    Raises ApiError or an EngineError.
    """
    context, exchange, lease = context_of(request), exchange_of(request.scope), lease_of(request.scope)
    check_model(context, body.model)
    form = context.engine.reply_format
    tools, shown = await off_loop(context, lease.num_bytes + past_bytes, lambda: _read(body, form))

    with_special = bool(body.add_special_tokens)

    async def prepare(engine: Engine) -> list[Prompt]:
        token_ids = await shown.render(engine, add_special_tokens=with_special, tenant=exchange.tenant)
        return [Prompt(truncated(body, token_ids, engine.info))]

    rules = ReplyRules(tools, body.thinking_token_budget, may_think(shown.options))
    follows = context.next_turns
    if follows is not None and not follows.keeps(
        lease.num_bytes, body.num_choices, is_background=exchange.is_background
    ):
        follows = None
    submission = Submission(
        reply_id=reply_id,
        endpoint=request.scope["path"],
        body=body,
        num_prompts=1,
        prepare=prepare,
        exchange=exchange,
        lease=lease,
        rules=rules,
        held_bytes=lease.num_bytes if echoes or tools is not None or follows is not None else 0,
    )
    salt = owned_salt(cache_owner(context, exchange), body.cache_salt)
    generation = await open_generation(context, submission)
    if follows is not None:
        follows.follow(generation, Chat(shown, rules, with_special, exchange.tenant, salt))
    return generation


def _read(body: ChatCompletionRequest, form: ReplyFormat) -> tuple[ToolRules | None, ChatInput]:
    """What may be called, and what the chat template shows. Raises ApiError."""
    tools = read_tools(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("'top_logprobs' needs 'logprobs': true.", "top_logprobs")
    return tools, chat_input(body, tools, form)


def _is_named(body: ChatCompletionRequest) -> bool:
    choice = body.tool_choice or body.function_call
    return choice is not None and choice.name is not None


@dataclass(frozen=True, slots=True)
class ChatShape:
    """OpenAI's chat.completion objects."""

    body: ChatCompletionRequest
    spelling: TokenSpelling
    is_named: bool = False  # the one tool that has to be called is
    is_legacy: bool = False  # calls are told in the older field

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
        if not parts and (delta.logprobs or (tells_tokens(self.body) and delta.token_ids)):
            parts = [{"content": ""}]
        for i, part in enumerate(parts):
            yield self._chunk(choice, part, None if i else delta)
        if delta.finish is not None:
            ending = {"index": choice.index, "delta": {}, "logprobs": None, **self._ending(choice)}
            yield {"choices": [ending]}

    def _parts(self, choice: Choice, delta: OutputDelta) -> list[dict[str, object]]:
        """What the message grows by: nothing, while the text may yet be part of a mark."""
        assert choice.reader is not None
        ended = delta.finish is not None
        pieces = choice.reader.read(delta.text, ended=ended, cut=choice.is_cut)
        return deltas_of(pieces, is_legacy=self.is_legacy)

    def _chunk(
        self, choice: Choice, message: dict[str, object], delta: OutputDelta | None = None
    ) -> dict[str, object]:
        entry = {
            "index": choice.index,
            "delta": message,
            "logprobs": None if delta is None else self._logprobs(delta.logprobs),
            "finish_reason": None,
        }
        if delta is not None:
            entry |= token_fields(self.body, delta)
        return {"choices": [entry]}

    def choice(self, choice: Choice, output: Collected) -> dict[str, object]:
        """The whole choice."""
        reader = choice.reader
        assert reader is not None
        whole = reader.whole("".join(output.text), cut=choice.is_cut)
        return {
            "index": choice.index,
            "message": message_of(whole, thinks=reader.thinks, is_legacy=self.is_legacy),
            "logprobs": self._logprobs(output.logprobs),
            **self._ending(choice),
            **token_fields(self.body, output),
        }

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

    def _ending(self, choice: Choice) -> dict[str, object]:
        """How the choice ended: with calls, if it did not end before its time.

        OpenAI says `stop` of a call of the tool asked for by name.
        """
        fields = finish_fields(choice)
        has_calls = choice.reader is not None and choice.reader.has_calls
        if has_calls and not self.is_named and fields["finish_reason"] == "stop":
            fields["finish_reason"] = "function_call" if self.is_legacy else "tool_calls"
        return fields
