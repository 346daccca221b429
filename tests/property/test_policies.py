"""What the policies promise, under random work: bounded service gaps, bounded overtaking, nobody starves."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import count

import hypothesis.strategies as st
from hypothesis import example, given, settings

from engine.plan.request import Request, RequestStatus
from engine.plan.scheduling.batcher import ContinuousBatcher
from engine.plan.scheduling.policy import SchedulingPolicy, make_policy
from engine.plan.scheduling.request_queue import RequestQueue
from engine.plan.step_records import SampledRows
from tests.support.examples import share_of
from tests.support.factories import make_batcher, make_request

W_PROMPT, W_OUTPUT = 1, 2
MAX_LEN = 48
JOBS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 18)), min_size=1, max_size=6)
EXAMPLES = settings(max_examples=share_of(60), deadline=None)


def run_step(batcher: ContinuousBatcher) -> list[Request]:
    """One step with made-up tokens; whom it gave one."""
    decision = batcher.step()
    if decision.inputs is None:
        return []
    committed = batcher.commit(decision, SampledRows([7] * len(decision.inputs.logits_rows)))
    return [token.request for token in committed]


class Backlog:
    """Tenants that always have requests waiting, and what each of them was served so far.

    More of each than there are seats: a tenant whose last ones are all seated, and end together, has left for
    a moment, and who comes back brings no credit for it.
    """

    def __init__(
        self, batcher: ContinuousBatcher, jobs: dict[str, list[tuple[int, int]]], excess: int
    ) -> None:
        self.batcher = batcher
        self.served: Counter[str] = Counter()
        self._jobs = jobs
        self._numbers = count(1)
        self._computed: dict[str, int] = {}  # prompt tokens ever computed, by request
        self._live: list[Request] = []
        self._next: defaultdict[str, int] = defaultdict(int)
        least = batcher.config.max_num_seqs + 1
        self._depth = {tenant: least + excess * (tenant == "greedy") for tenant in jobs}

    def refill(self) -> None:
        waiting = Counter(r.tenant for r in self._live if r.status is RequestStatus.WAITING)
        for tenant, jobs in self._jobs.items():
            for _ in range(self._depth[tenant] - waiting[tenant]):
                prompt, max_tokens = jobs[self._next[tenant] % len(jobs)]
                self._next[tenant] += 1
                number = next(self._numbers)
                request = make_request(f"r{number}", prompt, arrival=number, max_tokens=max_tokens)
                request.tenant = tenant
                self.batcher.add(request)
                self._live.append(request)

    def step(self) -> None:
        self.refill()
        for request in run_step(self.batcher):
            assert request.tenant is not None
            self.served[request.tenant] += W_OUTPUT
        for request in self._live:
            assert request.tenant is not None
            now = min(request.num_prompt_tokens, request.num_computed_tokens)
            new = now - self._computed.get(request.request_id, 0)
            if new > 0:
                self._computed[request.request_id] = now
                self.served[request.tenant] += W_PROMPT * new
        self._live = [request for request in self._live if not request.is_finished]


@EXAMPLES
@given(greedy=JOBS, modest=JOBS, seats=st.integers(1, 6), budget=st.sampled_from([4, 16, 64]))
@example(greedy=[(1, 3)], modest=[(1, 3)], seats=3, budget=4)  # all seats are freed at once
def test_two_tenants_with_work_are_served_within_the_bound(
    greedy: list[tuple[int, int]], modest: list[tuple[int, int]], seats: int, budget: int
) -> None:
    """Over every interval, though one of them keeps 20 times as many requests waiting."""
    batcher = make_batcher(
        num_blocks=seats * MAX_LEN // 4,  # every seat can grow to its end: nobody is preempted
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        max_model_len=MAX_LEN,
        policy="fair",
    )
    backlog = Backlog(batcher, {"greedy": greedy, "modest": modest}, excess=40)
    longest = max(prompt for prompt, _ in greedy + modest)
    bound = 2 * max(W_PROMPT * longest, W_OUTPUT * batcher.kv.num_blocks * batcher.kv.block_size)
    backlog.refill()
    gaps = [0]
    for _ in range(250):
        backlog.step()
        gaps.append(backlog.served["greedy"] - backlog.served["modest"])
    assert max(gaps) - min(gaps) <= bound
    assert min(backlog.served.values()) > 0


@EXAMPLES
@given(greedy=JOBS, modest=JOBS, idle_steps=st.integers(0, 200))
def test_an_idle_tenant_saves_up_nothing(
    greedy: list[tuple[int, int]], modest: list[tuple[int, int]], idle_steps: int
) -> None:
    batcher = make_batcher(num_blocks=36, max_num_seqs=3, max_model_len=MAX_LEN, policy="fair")
    backlog = Backlog(batcher, {"greedy": greedy}, excess=5)
    for _ in range(idle_steps):
        backlog.step()
    backlog.served.clear()
    backlog._jobs["modest"], backlog._depth["modest"] = modest, 2
    bound = 2 * W_OUTPUT * 36 * 4
    for _ in range(150):
        backlog.step()
        assert backlog.served["modest"] - backlog.served["greedy"] <= bound


@EXAMPLES
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 400), st.one_of(st.integers(1, 5), st.integers(200, 400))),
        min_size=1,
        max_size=60,
    )
)
def test_shortest_first_makes_nobody_wait_ten_times_as_long(arrivals: list[tuple[int, int]]) -> None:
    """One request at a time, one token a second: the wait under fcfs is the work found on arrival."""
    fcfs, sjf = serve("fcfs", arrivals), serve("sjf", arrivals)
    for number, wait in fcfs.items():
        assert sjf[number] <= 10 * wait


def serve(policy: str, arrivals: list[tuple[int, int]]) -> dict[int, int]:
    """How long each request waits for its start."""
    queue = RequestQueue(make_policy(policy, 0.0))
    coming = [(time, number, size) for number, (time, size) in enumerate(sorted(arrivals))]
    arrived = {number: time for time, number, _ in coming}
    now = 0
    waits: dict[int, int] = {}
    while coming or len(queue):
        while coming and coming[0][0] <= now:
            _, number, size = coming.pop(0)
            queue.add(make_request(str(number), 1, arrival=number, max_tokens=size))
        if len(queue):
            request = queue.pop()
            waits[request.arrival] = now - arrived[request.arrival]
            now += request.num_remaining_tokens
        else:
            now = coming[0][0]
    return waits


@EXAMPLES
@given(
    jobs=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 10)), max_size=30),
    seats=st.integers(1, 4),
    budget=st.sampled_from([1, 3, 16]),
)
def test_orca_never_gives_a_step_to_the_younger_and_not_to_the_older(
    jobs: list[tuple[int, int]], seats: int, budget: int
) -> None:
    batcher = make_batcher(
        num_blocks=200, max_num_seqs=seats, max_num_batched_tokens=budget, policy="orca", max_model_len=32
    )
    live: list[Request] = []
    for number, (prompt, max_tokens) in enumerate(jobs):
        live.append(make_request(f"r{number}", prompt, arrival=number, max_tokens=max_tokens))
        batcher.add(live[-1])
    while live:
        decision = batcher.step()
        assert decision.inputs is not None
        chosen = {entry.request_id for entry in decision.scheduled}
        assert chosen == {request.request_id for request in live[: len(chosen)]}
        batcher.commit(decision, SampledRows([7] * len(decision.inputs.logits_rows)))
        live = [request for request in live if not request.is_finished]


@EXAMPLES
@given(
    commands=st.lists(
        st.tuples(
            st.sampled_from(["add", "preempted", "pop", "remove", "charge", "rank", "hold", "let go"]),
            st.integers(0, 5),
            st.integers(-3, 30),
        ),
        max_size=60,
    )
)
def test_the_next_of_a_fair_queue_is_the_least_of_all_that_wait(commands: list[tuple[str, int, int]]) -> None:
    policy = make_policy("fair", 0.0)
    queue = RequestQueue(policy)
    for number, (command, which, amount) in enumerate(commands):
        waiting = sorted(queue, key=lambda request: request.arrival)
        chosen = waiting[amount % len(waiting)] if waiting else None
        if command in ("add", "preempted"):
            request = make_request(str(number), 2, arrival=number, priority=amount)
            request.tenant = f"t{which}"
            if command == "preempted":
                request.status = RequestStatus.PREEMPTED
            queue.add(request)
        elif command == "charge":
            served = make_request("", max(1, amount))
            served.tenant = f"t{which}"
            policy.charge(served, max(1, amount), 0)
        elif command == "let go":
            queue.unhold(str(which))
        elif command == "pop" and queue.peek() is not None:
            queue.pop()
        elif command == "remove" and chosen is not None:
            queue.remove(chosen.request_id)
        elif command == "rank" and chosen is not None:
            chosen.priority = amount
            queue.reprioritize(chosen.request_id)
        elif command == "hold" and chosen is not None and queue.held_for(chosen.request_id) is None:
            queue.hold(chosen.request_id, str(which))
        assert queue.peek() is _next_by_hand(queue, policy)


def _next_by_hand(queue: RequestQueue, policy: SchedulingPolicy) -> Request | None:
    """The best by policy of each tenant's first, which has run before if any of them has."""
    heads: dict[str, Request] = {}
    for request in sorted(queue, key=lambda r: (r.status is RequestStatus.WAITING, policy.key(r))):
        if queue.held_for(request.request_id) is None:
            heads.setdefault(policy.lane(request), request)
    return min(heads.values(), key=policy.key, default=None)
