"""torch.compile on the plain model's decode step, in a process of its own so that it can be given up on.

Started with the model directory; reads one JSON line `{"batch": …, "context": …, "steps": …}` from stdin at a
time and answers with the milliseconds of a step as it is and compiled, and the seconds compiling took.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
import torch._inductor.config
from transformers import AutoModelForCausalLM, StaticCache

from engine import prepare_process

Step = Callable[..., Any]


class PlainDecoder:
    """transformers' own model and dense K/V cache: no pages, no scheduler, the easiest case for a compiler.

    Frozen weights let inductor pack them for oneDNN; max-autotune is off, it takes minutes more.
    """

    def __init__(self, directory: str) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        torch._inductor.config.freezing = True
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.bfloat16, attn_implementation="sdpa", local_files_only=True
        )
        self._model.eval().requires_grad_(False)

    @torch.no_grad()
    def measure(self, batch: int, context: int, steps: int) -> dict[str, float]:
        """Both, over `steps` steps that end at `context`."""
        cache = StaticCache(config=self._model.config, max_cache_len=context)
        torch._dynamo.reset()
        compiled = torch.compile(self._model.forward, dynamic=False)
        tokens = torch.full((batch, 1), 1)  # [batch, 1]
        plain_s = self._step_s(self._model.forward, tokens, cache, context - steps, steps)
        started = perf_counter()
        self._step_s(compiled, tokens, cache, context - steps, 2)
        compile_s = perf_counter() - started
        compiled_s = self._step_s(compiled, tokens, cache, context - steps, steps)
        return {"plain_ms": 1e3 * plain_s, "compiled_ms": 1e3 * compiled_s, "compile_s": compile_s}

    def _step_s(self, step: Step, tokens: torch.Tensor, cache: StaticCache, first: int, steps: int) -> float:
        """Mean seconds of a step and the likeliest token of each row, after one that is not counted."""
        rewind(cache, 0)
        step(tokens, past_key_values=cache, use_cache=True)  # makes the cache, or compiles
        rewind(cache, first)
        started = perf_counter()
        for _ in range(steps):
            step(tokens, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1).tolist()
        return (perf_counter() - started) / steps


def rewind(cache: StaticCache, num_tokens: int) -> None:
    """Go on as if there had been so many tokens."""
    for layer in cache.layers:
        layer.cumulative_length.fill_(num_tokens)


def main() -> None:
    """Answer until stdin ends; nothing but answers goes to stdout."""
    answers, sys.stdout = sys.stdout, sys.stderr
    prepare_process()
    decoder = PlainDecoder(sys.argv[1])
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = dict(decoder.measure(**json.loads(line)))
        except Exception as error:  # whatever it was, the benchmark reports it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
