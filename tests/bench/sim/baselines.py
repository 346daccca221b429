"""What continuous batching is compared with. Not for use: each does on purpose what the engine avoids."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from tests.bench.sim.cost import StepCost
from tests.bench.sim.run import Outcome, Run
from tests.bench.sim.server import Server
from tests.bench.sim.trace import Trace


def run_static_batches(trace: Trace, cost: StepCost, batch_size: int) -> Run:
    """Batches of `batch_size`, each waited for until it is full and run until its longest request ends.

    Every row is computed to the end, as padding, and the whole batch is answered then. The last batch may be
    smaller; it is not waited for.
    """
    outcomes = [Outcome(arrival) for arrival in trace]
    now, num_steps = 0.0, 0
    for first in range(0, len(outcomes), batch_size):
        batch = outcomes[first : first + batch_size]
        start = max(now, batch[-1].arrival.time)
        longest_prompt = max(outcome.arrival.prompt_tokens for outcome in batch)
        longest_output = max(outcome.arrival.output_tokens for outcome in batch)
        prefill_s = cost.step_s(len(batch) * longest_prompt, 0)
        decode_s = cost.step_s(0, len(batch))
        now = start + prefill_s + (longest_output - 1) * decode_s
        num_steps += longest_output
        for outcome in batch:
            first_token = start + prefill_s
            outcome.token_times = [first_token + i * decode_s for i in range(outcome.arrival.output_tokens)]
            outcome.seated_time, outcome.finish_time = start, now
    return Run(outcomes, now, num_steps)


def reserving(server: Server) -> Server:
    """The same memory, but every request reserves `max_model_len` from its start, used or not.

    That leaves a seat for each such reservation that fits, and then no request ever runs out of blocks.
    """
    blocks_per_seq = -(-server.max_model_len // server.block_size)
    return replace(server, max_num_seqs=min(server.max_num_seqs, server.num_blocks // blocks_per_seq))


def run_prefill_first(trace: Trace, cost: StepCost, max_num_seqs: int, max_tokens: int) -> Run:
    """Whole prompts before decodes: a step is either prompts, up to `max_tokens` of them, or all decodes.

    A prompt longer than `max_tokens` gets a step of its own. Memory is without limit.
    """
    outcomes = [Outcome(arrival) for arrival in trace]
    coming, waiting = deque(outcomes), deque[Outcome]()
    running: list[Outcome] = []
    now, num_steps = 0.0, 0
    while coming or waiting or running:
        if not waiting and not running:
            now = max(now, coming[0].arrival.time)
        while coming and coming[0].arrival.time <= now:
            waiting.append(coming.popleft())
        prompts = _next_prompts(waiting, max_num_seqs - len(running), max_tokens)
        for outcome in prompts:
            outcome.seated_time = now
        num_prefill = sum(outcome.arrival.prompt_tokens for outcome in prompts)
        now += cost.step_s(num_prefill, 0 if prompts else len(running))
        num_steps += 1
        advanced = prompts or running
        for outcome in advanced:
            outcome.token_times.append(now)
        running += prompts
        for outcome in advanced:
            if len(outcome.token_times) == outcome.arrival.output_tokens:
                outcome.finish_time = now
        running = [outcome for outcome in running if outcome.finish_time is None]
    return Run(outcomes, now, num_steps)


def _next_prompts(waiting: deque[Outcome], seats: int, max_tokens: int) -> list[Outcome]:
    prompts: list[Outcome] = []
    left = max_tokens
    while waiting and len(prompts) < seats and (not prompts or waiting[0].arrival.prompt_tokens <= left):
        left -= waiting[0].arrival.prompt_tokens
        prompts.append(waiting.popleft())
    return prompts
