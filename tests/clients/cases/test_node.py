"""What comes from npm: the official packages for Node, Vercel's AI SDK, and two agents on a command line.

They are looked for in the folder that --node names; without npm there is none.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent / "node"
TURN_S = 100
CODEX = """
model = "test-model"
model_provider = "here"
[model_providers.here]
name = "here"
base_url = "{url}/v1"
wire_api = "responses"
"""
OPENCODE: dict[str, Any] = {
    "autoupdate": False,
    "share": "disabled",
    "permission": {"*": "allow"},
    "provider": {
        "here": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"apiKey": "none"},
            "models": {"test-model": {"tool_call": True, "limit": {"context": 100000, "output": 4096}}},
        }
    },
}


@pytest.fixture(scope="session")
def node(pytestconfig: pytest.Config) -> Path:
    folder = Path(pytestconfig.getoption("--node"))
    if not (folder / "node_modules").is_dir():
        pytest.skip("npm is not here, or make test-clients did not ask it")
    return folder


def run(*command: str, folder: Path, **variables: str) -> str:
    """What a command writes; it must end well."""
    env = {**os.environ, "HOME": str(folder), "PWD": str(folder), **variables}
    done = subprocess.run(
        command, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TURN_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["openai_node", "anthropic_node", "vercel_ai"])
def test_packages(node: Path, scripted: str, name: str) -> None:
    # Node looks for packages from where a script lies.
    script = node / f"{name}.mjs"
    script.write_text((SCRIPTS / f"{name}.mjs").read_text())
    run("node", str(script), scripted, folder=node)


def test_claude_code(node: Path, scripted: str, tmp_path: Path) -> None:
    """One turn that calls a tool, which refuses what the script asks of it, and the answer to that."""
    variables = {
        "ANTHROPIC_BASE_URL": scripted,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": "test-model",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    command = (str(node / "node_modules/.bin/claude"), "-p", "hi", "--output-format", "json")
    result = json.loads(run(*command, folder=tmp_path, **variables))
    assert (result["is_error"], result["num_turns"]) == (False, 2), result
    assert result["result"] == "The answer is 42."


def test_codex(node: Path, scripted: str, tmp_path: Path) -> None:
    """One turn that runs a command, and the answer to what came of it."""
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex/config.toml").write_text(CODEX.format(url=scripted))
    codex = str(node / "node_modules/.bin/codex")
    told = run(codex, "exec", "--skip-git-repo-check", "--json", "hi", folder=tmp_path)
    events: list[dict[str, Any]] = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    assert "command_execution" in [item["type"] for item in items]
    assert items[-1]["type"] == "agent_message" and items[-1]["text"] == "The answer is 42."
    assert events[-1]["type"] == "turn.completed"


def test_opencode(node: Path, scripted: str, tmp_path: Path) -> None:
    """One turn that runs a tool, and the answer to what came of it."""
    settings = json.loads(json.dumps(OPENCODE))
    settings["provider"]["here"]["options"]["baseURL"] = f"{scripted}/v1"
    (tmp_path / "opencode.json").write_text(json.dumps(settings))
    opencode = str(node / "node_modules/.bin/opencode")
    command = (opencode, "run", "--model", "here/test-model", "--format", "json", "--title", "t", "hi")
    told = run(*command, folder=tmp_path, OPENCODE_DISABLE_MODELS_FETCH="1", OPENCODE_DISABLE_AUTOUPDATE="1")
    events: list[dict[str, Any]] = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    kinds = [event["type"] for event in events]
    assert "tool_use" in kinds and "error" not in kinds, told
    texts = [event["part"]["text"] for event in events if event["type"] == "text"]
    assert texts[-1] == "The answer is 42."
