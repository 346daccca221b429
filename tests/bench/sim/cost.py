"""StepCost: how long the simulated device takes for a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepCost:
    """A step takes a fixed time and more for each token; prefill and decode tokens may differ."""

    name: str
    fixed_s: float
    prefill_token_s: float
    decode_token_s: float

    def step_s(self, num_prefill_tokens: int, num_decode_tokens: int) -> float:
        """Seconds for a step of so many tokens."""
        tokens_s = num_prefill_tokens * self.prefill_token_s + num_decode_tokens * self.decode_token_s
        return self.fixed_s + tokens_s

    def alone_s(self, num_prompt_tokens: int, num_output_tokens: int) -> float:
        """Seconds for a request that is alone, its prompt in one step."""
        decodes = num_output_tokens - 1
        return self.step_s(num_prompt_tokens, 0) + decodes * self.step_s(0, 1)


GPU_LIKE = StepCost("gpu-like", fixed_s=0.020, prefill_token_s=0.00012, decode_token_s=0.00012)
CPU_LIKE = StepCost("cpu-like", fixed_s=0.021, prefill_token_s=0.0004, decode_token_s=0.00035)
