"""What well-known clients send, as data: the whole body of a request as each of them forms it."""

from __future__ import annotations

from typing import Any, NamedTuple

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TALK = [{"role": "user", "content": "Say hi."}]
BOTH_USAGES = {"include_usage": True, "continuous_usage_stats": True}


class ClientBody(NamedTuple):
    """One request of one client."""

    client: str
    path: str
    body: dict[str, Any]


LM_EVAL_SCORES = ClientBody(
    "lm-eval: log-likelihoods of a batch, prompts as token ids",
    COMPLETIONS,
    {
        "model": "test-model",
        "prompt": [[104, 101, 108, 108, 111], [97, 98, 99]],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    },
)
LM_EVAL_TEXTS = ClientBody(
    "lm-eval: generate_until, a batch of token ids",
    COMPLETIONS,
    {
        "prompt": [[104, 105], [97, 98, 99]],
        "model": "test-model",
        "max_tokens": 8,
        "temperature": 0,
        "stop": ["\n\n", "Question:"],
        "seed": 1234,
    },
)
BODIES = (
    LM_EVAL_SCORES,
    LM_EVAL_TEXTS,
    ClientBody(
        "guidellm: completions",
        COMPLETIONS,
        {
            "model": "test-model",
            "prompt": "hello",
            "stream": True,
            "stream_options": BOTH_USAGES,
            "max_tokens": 8,
            "stop": None,
            "ignore_eos": True,
        },
    ),
    ClientBody(
        "guidellm: chat",
        CHAT,
        {
            "model": "test-model",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
            "stream": True,
            "stream_options": BOTH_USAGES,
            "max_completion_tokens": 8,
            "stop": None,
            "ignore_eos": True,
        },
    ),
    ClientBody(
        "aiperf: chat",
        CHAT,
        {
            "messages": [{"role": "user", "content": "hello", "name": "user-1"}],
            "model": "test-model",
            "stream": True,
            "max_completion_tokens": 8,
            "min_tokens": 8,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        },
    ),
    ClientBody(
        "aiperf: completions",
        COMPLETIONS,
        {
            "prompt": ["hello"],
            "model": "test-model",
            "stream": True,
            "max_tokens": 8,
            "stream_options": {"include_usage": True},
        },
    ),
    ClientBody("aiperf: is it ready", CHAT, {"model": "test-model", "messages": TALK, "max_tokens": 1}),
    ClientBody(
        "vLLM's bench client: completions",
        COMPLETIONS,
        {
            "model": "test-model",
            "prompt": "hello",
            "repetition_penalty": 1.0,
            "max_tokens": 8,
            "logprobs": None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "temperature": 0.0,
        },
    ),
    ClientBody(
        "vLLM's bench client: chat",
        CHAT,
        {
            "model": "test-model",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
            "max_completion_tokens": 8,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "temperature": 0.0,
        },
    ),
    ClientBody(
        "LangChain: chat",
        CHAT,
        {
            "messages": TALK,
            "model": "test-model",
            "stream": True,
            "temperature": 0.7,
            "max_tokens": 8,
            "n": 1,
        },
    ),
    ClientBody(
        "LangChain: chat, a talk with parts",
        CHAT,
        {
            "messages": [
                {"content": "Be brief.", "role": "system"},
                {"content": "Hi", "role": "user"},
                {"content": "Hello", "role": "assistant"},
                {
                    "content": [{"type": "text", "text": "And"}, {"type": "text", "text": " now?"}],
                    "role": "user",
                },
            ],
            "model": "test-model",
            "stream": False,
            "stop": ["Observation:"],
            "max_completion_tokens": 8,
        },
    ),
    ClientBody(
        "LiteLLM: chat",
        CHAT,
        {
            "model": "test-model",
            "messages": TALK,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 8,
            "top_p": 1,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "user": "someone",
            "metadata": {"trace": "1"},
        },
    ),
    ClientBody(
        "Open WebUI: chat",
        CHAT,
        {
            "stream": True,
            "model": "test-model",
            "messages": [{"role": "system", "content": "You help."}, *TALK],
            "stream_options": {"include_usage": True},
            "max_tokens": 8,
        },
    ),
    ClientBody(
        "Open WebUI: a title",
        CHAT,
        {"model": "test-model", "messages": TALK, "stream": False, "max_completion_tokens": 8},
    ),
)
