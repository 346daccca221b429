"""The table of tuning constants in engine/README.md names modules and constants that exist."""

from __future__ import annotations

import re
from pathlib import Path

ENGINE = Path(__file__).parents[2] / "engine"


def test_each_constant_of_speculation_stands_in_a_module_that_its_row_names() -> None:
    section = (ENGINE / "README.md").read_text(encoding="utf-8").split("## Constants of speculation", 1)[1]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ") and ".py`" in line]
    assert len(rows) > 8
    for name, *_, constants in rows:
        sources = [
            (ENGINE / path).read_text(encoding="utf-8") for path in re.findall(r"`([\w/]+\.py)`", name)
        ]
        assert sources, name
        for constant in re.findall(r"`(_?[A-Z][A-Z_]+)`", constants):
            assigned = re.compile(rf"^[A-Z_, ]*\b{constant}\b.*=", re.MULTILINE)
            assert any(map(assigned.search, sources)), f"{constant} is not in the modules of {name}"
