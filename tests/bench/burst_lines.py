"""How a worker talks: a JSON burst a line in, a JSON line of stream records out. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, TextIO

from tests.bench.streams import StreamRecord

Run = Callable[[list[list[int]], int], list[StreamRecord]]  # prompts as token ids, output tokens of each


def answer_bursts(run: Run, questions: Iterable[str], answers: TextIO) -> None:
    """Answer each line until they end; what `run` raises is an answer, too."""
    for line in questions:
        burst = json.loads(line)
        try:
            records = run(burst["prompts"], burst["max_tokens"])
            answer: dict[str, Any] = {"records": [asdict(record) for record in records]}
        except Exception as error:  # whatever it was, the benchmark reports it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
