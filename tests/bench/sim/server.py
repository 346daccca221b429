"""Server and Simulation: the real batcher and KV manager under a virtual clock, without a model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.plan.kv.paged_kv_manager import PagedKvManager
from engine.plan.request import FinishReason, Request, RequestStatus, SamplingParams
from engine.plan.scheduling.batcher import ContinuousBatcher
from engine.plan.scheduling.policy import make_policy
from engine.plan.scheduling.step_planner import BatchConfig
from engine.plan.step_records import SampledRows
from tests.bench.sim.cost import GPU_LIKE, StepCost
from tests.bench.sim.run import Outcome, Run
from tests.bench.sim.trace import Arrival, Trace

ANY_TOKEN, LAST_TOKEN = (
    7,
    8,
)  # no model: requests end by their length, or by the last token where it is hidden


@dataclass(frozen=True, slots=True)
class Server:
    """A device and the limits it is served with, named as the daemon's flags are."""

    cost: StepCost = GPU_LIKE
    num_blocks: int = 4096
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 2048
    policy: str = "fcfs"
    aging_s: float = 0.0
    prefix_caching: bool = False
    keeps_deadlines: bool = False  # refuses what cannot meet its deadline, and ends what has missed it
    hides_lengths: bool = False  # nobody knows how long a reply will be but the model
    exempt: frozenset[int] = frozenset()  # the numbers of requests that are not refused

    @property
    def num_slots(self) -> int:
        """Tokens whose KV fits."""
        return self.num_blocks * self.block_size

    def make_batcher(self, clock: Callable[[], float]) -> ContinuousBatcher:
        """A fresh batcher over a KV manager of its own."""
        config = BatchConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_prefill_tokens=self.max_num_batched_tokens,
            max_decode_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            max_logits_rows=max(self.max_num_seqs, self.max_num_batched_tokens),
            prefix_caching=self.prefix_caching,
        )
        blocks_per_seq = -(-self.max_model_len // self.block_size)
        kv = PagedKvManager(self.num_blocks, self.block_size, self.max_num_seqs, blocks_per_seq)
        return ContinuousBatcher(config, kv, make_policy(self.policy, self.aging_s), clock)


class Simulation:
    """One trace through one server. Deterministic: nothing in it depends on the time it takes.

    A request is taken in at the first step that begins at or after its arrival. A step takes what the cost
    says, and all its tokens come at its end. `on_step` is called after each with its seconds.
    """

    def __init__(
        self, trace: Trace, server: Server, on_step: Callable[[Simulation, float], None] | None = None
    ) -> None:
        self.server = server
        self.now = 0.0
        self.num_steps = 0
        self.batcher = server.make_batcher(lambda: self.now)
        self.requests: dict[str, Request] = {}  # those that have not ended
        self.ended: list[Request] = []  # those that the last step ended
        self._outcomes = [Outcome(arrival) for arrival in trace]
        self._by_id: dict[str, Outcome] = {}
        self._coming = deque(enumerate(self._outcomes))
        self._on_step = on_step

    def run(self) -> Run:
        """From the first arrival until nobody is left; every block is free then."""
        while self._coming or self.batcher.has_work:
            if not self.batcher.has_work:
                self.now = max(self.now, self._coming[0][1].arrival.time)
            self._take_in()
            if self.server.keeps_deadlines:
                self._expire()
            self._step()
        assert self.batcher.kv.num_used_blocks == 0, "the simulation leaks blocks"
        return Run(self._outcomes, self.now, self.num_steps)

    @property
    def running(self) -> list[Request]:
        """Those that hold KV now."""
        return [r for r in self.requests.values() if r.status is RequestStatus.RUNNING]

    def _take_in(self) -> None:
        while self._coming and self._coming[0][1].arrival.time <= self.now:
            number, outcome = self._coming.popleft()
            request = make_request(number, outcome.arrival, self.server)
            if not self._takes(number, request):
                outcome.refused = True
                continue
            self._by_id[request.request_id] = outcome
            self.requests[request.request_id] = request
            self.batcher.add(request)

    def _takes(self, number: int, request: Request) -> bool:
        """False if this request of the trace is refused."""
        is_exempt = not self.server.keeps_deadlines or number in self.server.exempt
        return is_exempt or self.batcher.can_meet(request)

    def _expire(self) -> None:
        late = [r for r in self.requests.values() if r.deadline is not None and r.deadline <= self.now]
        for request in late:
            self._expire_one(request)
        while (first := self.batcher.hopeless()) is not None:
            if int(first.request_id) in self.server.exempt:
                return
            self._expire_one(first)

    def _expire_one(self, request: Request) -> None:
        self.batcher.finish(request.request_id, FinishReason.DEADLINE)
        self._by_id[request.request_id].expired = True
        self._close(request)

    def _step(self) -> None:
        decision = self.batcher.step()
        if decision.inputs is None:
            return
        seconds = self.server.cost.step_s(decision.num_prefill_tokens, decision.num_decode_tokens)
        self.now += seconds
        self.batcher.rates.observe(decision.num_prefill_tokens, decision.num_decode_tokens, seconds)
        self.batcher.rates.observe_clock(decision.num_decode_tokens, seconds)
        self.num_steps += 1
        self.ended.clear()
        tokens = [self._next_token(entry.request_id) for entry in decision.scheduled if entry.samples]
        for token in self.batcher.commit(decision, SampledRows(tokens)):
            request = token.request
            outcome = self._by_id[request.request_id]
            outcome.token_times.append(self.now)
            if token.finish_reason is not None:
                outcome.finish_time = self.now
                self._close(request)
        if self._on_step is not None:
            self._on_step(self, seconds)

    def _next_token(self, request_id: str) -> int:
        request, outcome = self.requests[request_id], self._by_id[request_id]
        return LAST_TOKEN if request.num_output_tokens + 1 == outcome.arrival.output_tokens else ANY_TOKEN

    def _close(self, request: Request) -> None:
        outcome = self._by_id.pop(request.request_id)
        outcome.seated_time = request.first_scheduled_time
        outcome.num_cached_tokens = request.num_cached_tokens
        outcome.num_preemptions = request.num_preemptions
        self.ended.append(self.requests.pop(request.request_id))


def make_request(number: int, arrival: Arrival, server: Server) -> Request:
    """The scheduler's record of the trace's request `number`."""
    is_hidden = server.hides_lengths
    num_left = server.max_model_len - arrival.prompt_tokens
    return Request(
        request_id=str(number),
        token_ids=arrival.token_ids(number),
        num_prompt_tokens=arrival.prompt_tokens,
        sampling=SamplingParams(
            max_tokens=num_left if is_hidden else arrival.output_tokens, ignore_eos=not is_hidden
        ),
        stop_token_ids=frozenset([LAST_TOKEN] if is_hidden else []),
        arrival=number,
        arrival_time=arrival.time,
        priority=arrival.priority,
        tenant=arrival.tenant,
        deadline=None if arrival.deadline_s is None else arrival.time + arrival.deadline_s,
    )


def simulate(trace: Trace, server: Server) -> Run:
    """One trace through one server."""
    return Simulation(trace, server).run()
