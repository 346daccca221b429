"""What two agents sent, a turn with a tool call and its result each; long texts are cut, one option left out.

Recorded from their command lines (`make test-clients` runs these) against a scripted model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.http_server import server_url
from tests.e2e.wire import ask
from tests.support import tool_templates
from tests.support.fake_engine import FakeEngine
from tests.support.messages_grammar import check_messages_stream
from tests.support.named_events import named_events
from tests.support.responses_grammar import check_responses_stream

RECORDED = Path(__file__).parents[1] / "support/agents"
CALLS = {
    "claude_code": '<tool_call>\n{"name": "Bash", "arguments": {"command": "ls"}}\n</tool_call>',
    "codex": '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "ls"}}\n</tool_call>',
}
IGNORED = {
    "claude_code": {"context_management"},
    "codex": {"client_metadata", "tools.web_search"},
}
SHOWN = {
    "claude_code": ["system", "user", "system", "assistant", "tool"],
    "codex": ["system", "user", "user", "assistant", "tool"],
}


def recorded(agent: str) -> list[dict[str, Any]]:
    requests: list[dict[str, Any]] = json.loads((RECORDED / f"{agent}.json").read_text())
    return requests


@pytest.mark.parametrize("agent", CALLS)
async def test_both_requests_of_a_turn_are_understood(agent: str) -> None:
    engine = FakeEngine(max_model_len=1 << 16, tool_template=tool_templates.ALL["hermes"], reply=CALLS[agent])
    check = check_messages_stream if agent == "claude_code" else check_responses_stream
    async with server_url(engine) as url:
        for number, request in enumerate(recorded(agent)):
            reply = await ask(url, "POST", request["path"], request["body"], request["headers"])
            assert reply.status == 200, reply.body
            assert set(reply.headers["x-slipstream-ignored"].split(",")) == IGNORED[agent]
            told = check(named_events(reply.body))
            blocks = told.get("content") or told["output"]
            assert [block["type"] for block in blocks] in (["tool_use"], ["function_call"])
            roles = [message["role"] for message in engine.messages]
            assert roles == SHOWN[agent][: 3 + 2 * number]
            assert "x-anthropic" not in str(engine.messages)
    assert engine.messages[-1]["tool_call_id"]
