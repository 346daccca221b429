"""Every block of the README says what it is for, and `make test-readme` takes it as a reader would."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.readme.blocks import Block, PageError, Step, commands_of, read_blocks, steps_of

ROOT = Path(__file__).parents[2]


def test_the_readme_can_be_followed() -> None:
    blocks = read_blocks((ROOT / "README.md").read_text())
    steps = [step for block in blocks if block.language == "sh" for step in steps_of(block.text)]
    assert steps[0].is_server and steps[0].script.startswith("make serve")
    assert any("curl" in step.script for step in steps)


def test_a_block_is_what_its_fence_says() -> None:
    page = "a\n```sh\nls\n```\n```toml my.toml\n[server]\n```\n```text\nx\n```\n"
    assert read_blocks(page) == [
        Block(2, "sh", None, "ls\n"),
        Block(5, "toml", "my.toml", "[server]\n"),
        Block(8, "text", None, "x\n"),
    ]


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("```\nls\n```\n", "line 1: the fence says 'nothing'; expected one of bash, json, python, sh, text"),
        ("x\n```ruby\n```\n", "line 2: the fence says 'ruby'"),
        ("```sh\nls\n", "line 1: the block has no end"),
    ],
)
def test_a_block_that_says_nothing_is_refused(page: str, words: str) -> None:
    with pytest.raises(PageError) as refused:
        read_blocks(page)
    assert words in str(refused.value)


def test_a_command_has_all_its_lines() -> None:
    script = "# first\nls\n\ncurl -d '{\n  \"a\": 1\n}' \\\n  -v  # shown\nfor i in 1; do\n  echo $i\ndone\n"
    assert list(commands_of(script)) == [
        "ls",
        "curl -d '{\n  \"a\": 1\n}' \\\n  -v  # shown",
        "for i in 1; do\n  echo $i\ndone",
    ]
    with pytest.raises(PageError, match="has no end"):
        list(commands_of("echo 'a"))


def test_servers_are_told_from_commands() -> None:
    script = "make serve  # it\nmake test\nls\nA=1 B=2 slipstream serve --port 1\nslipstream doctor\n"
    assert list(steps_of(script)) == [
        Step("make serve  # it", is_server=True),
        Step("make test\nls", is_server=False),
        Step("A=1 B=2 slipstream serve --port 1", is_server=True),
        Step("slipstream doctor", is_server=False),
    ]
