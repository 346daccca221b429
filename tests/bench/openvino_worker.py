"""OpenVINO GenAI's continuous batching, in a process and a Python of its own, which needs nothing of ours.

Started with the directory of an exported model; reads one JSON burst a line from stdin, answers with one JSON
line on stdout. Times are those of the step that gave a token, without HTTP and without text.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import openvino
import openvino_genai

from tests.bench.burst_lines import answer_bursts
from tests.bench.streams import StreamRecord

CACHE_GB = 2
MAX_BATCH_TOKENS = 512


@dataclass
class Request:
    """One at work: its handle and when each of its events came."""

    handle: Any
    num_prompt_tokens: int
    sent: float
    times: list[float] = field(default_factory=list)
    num_tokens: int = 0

    def note(self, now: float) -> None:
        """Take what the last step gave."""
        while self.handle.can_read():
            self.num_tokens += sum(len(output.generated_ids) for output in self.handle.read().values())
            self.times.append(now)

    def record(self) -> StreamRecord:
        """All of it."""
        return StreamRecord(self.sent, tuple(self.times), self.num_prompt_tokens, self.num_tokens)


class OpenVino:
    """The peer: bf16, prefixes cached."""

    def __init__(self, directory: str) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.max_num_batched_tokens = MAX_BATCH_TOKENS
        scheduler.enable_prefix_caching = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            directory, scheduler, "CPU", {"INFERENCE_PRECISION_HINT": "bf16"}
        )
        self._num_requests = 0

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[StreamRecord]:
        """Generate exactly `max_tokens` greedily for each prompt, all added at once."""
        config = openvino_genai.GenerationConfig(
            max_new_tokens=max_tokens, ignore_eos=True, do_sample=False, apply_chat_template=False
        )
        requests = []
        for prompt in prompts:
            self._num_requests += 1
            sent = perf_counter()
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            handle = self._pipeline.add_request(self._num_requests, ids, config)
            requests.append(Request(handle, len(prompt), sent))
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = perf_counter()
            for request in requests:
                request.note(now)
        return [request.record() for request in requests]


def main() -> None:
    """Answer bursts until stdin ends; nothing but answers goes to stdout."""
    answers, sys.stdout = sys.stdout, sys.stderr
    peer = OpenVino(sys.argv[1])
    answer_bursts(peer.run, sys.stdin, answers)


if __name__ == "__main__":
    main()
