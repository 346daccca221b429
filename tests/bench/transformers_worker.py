"""transformers' own continuous batching, `generate_batch`, in a process of its own so that it can be stopped.

Started with the model directory; reads one JSON burst a line from stdin, answers with one JSON line on
stdout. Times are those transformers notes itself: from a request's creation to each of its tokens, which
leaves out building and tearing down its manager.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from engine import prepare_process
from tests.bench.burst_lines import answer_bursts
from tests.bench.streams import StreamRecord

PAGE_TOKENS = 64
MAX_BATCH_TOKENS = 512
MAX_REQUESTS_PER_BATCH = 8


class GenerateBatch:
    """The peer, with the settings that gave it most output tokens a second here.

    Its SDPA path attends from every token of a batch to every cached token of all its requests under a mask,
    so small batches win: 8 requests and 512 tokens at once were best of 4 to 32 and 256 to 2048, sdpa better
    than eager, and torch.compile (its level 1, padded) slower than none. The cache is sized to the burst.
    """

    def __init__(self, directory: str) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.bfloat16, attn_implementation="sdpa", local_files_only=True
        )
        self._model.eval().requires_grad_(False)

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[StreamRecord]:
        """Generate exactly `max_tokens` greedily for each prompt, all added at once."""
        blocks = sum(-(-(len(prompt) + max_tokens) // PAGE_TOKENS) + 1 for prompt in prompts)
        batching = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=blocks + blocks // 4 + 2,  # its scheduler stops admitting when 15 % or less are free
            max_batch_tokens=MAX_BATCH_TOKENS,
            max_requests_per_batch=MAX_REQUESTS_PER_BATCH,
            allow_block_sharing=False,
        )
        outputs = self._model.generate_batch(
            inputs=prompts,
            generation_config=GenerationConfig(do_sample=False, max_new_tokens=max_tokens, eos_token_id=-1),
            continuous_batching_config=batching,
            record_timestamps=True,
        )
        return [record_of(output, max_tokens) for output in outputs.values()]


def record_of(output: Any, max_tokens: int) -> StreamRecord:
    """One finished request of transformers as a stream record. Raises RuntimeError when it did not finish."""
    if output.error is not None or len(output.generated_tokens) != max_tokens:
        got = f"{len(output.generated_tokens)} of {max_tokens} tokens"
        raise RuntimeError(f"{output.request_id} ended with {got}: {output.error}")
    return StreamRecord(
        sent=output.created_time,
        event_times=tuple(output.timestamps),
        num_prompt_tokens=len(output.prompt_ids),
        num_output_tokens=len(output.generated_tokens),
    )


def main() -> None:
    """Answer bursts until stdin ends; nothing but answers goes to stdout."""
    answers, sys.stdout = sys.stdout, sys.stderr
    prepare_process()  # the same tuning as our server's; what must precede torch came with the environment
    peer = GenerateBatch(sys.argv[1])
    answer_bursts(peer.run, sys.stdin, answers)


if __name__ == "__main__":
    main()
