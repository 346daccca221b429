"""Whose request makes passes fail: found by halves, from the last committed tokens."""

from __future__ import annotations

from collections.abc import Set

import pytest

from engine.plan.request import FinishReason, Request, RequestStatus
from engine.plan.scheduling.batcher import ContinuousBatcher
from tests.support.factories import make_batcher, make_request, make_runner
from tests.support.fakes import FakeRunner, expected_output

ANY = "any"


class Failing:
    """Drives a batcher whose passes fail with some requests in them; notes what each pass was for."""

    def __init__(self, batcher: ContinuousBatcher, guilty: Set[str]) -> None:
        self.batcher = batcher
        self.guilty = guilty
        self.runner: FakeRunner = make_runner(batcher)
        self.tried: list[str] = []
        self.blamed: list[list[str]] = []

    def step(self) -> None:
        decision = self.batcher.step()
        if decision.inputs is None:
            return
        aboard = [entry.request_id for entry in decision.scheduled]
        fails = ANY in self.guilty or not self.guilty.isdisjoint(aboard)
        self.tried.append("".join(aboard) + "!" * fails)
        if not fails:
            self.batcher.commit(decision, self.runner.run(decision.inputs).rows)
        elif blamed := self.batcher.isolate(decision):
            assert all(request.finish_reason is FinishReason.ERROR for request in blamed)
            self.blamed.append([request.request_id for request in blamed])

    def run(self) -> None:
        while self.batcher.has_work:
            self.step()
        self.batcher.kv.check_integrity()
        assert self.batcher.kv.num_used_blocks == 0


def added(batcher: ContinuousBatcher, names: str, max_tokens: int = 6) -> list[Request]:
    requests = [make_request(name, 5, arrival=i, max_tokens=max_tokens) for i, name in enumerate(names)]
    for request in requests:
        batcher.add(request)
    return requests


def assert_right(request: Request) -> None:
    prompt = request.token_ids[: request.num_prompt_tokens]
    assert request.output_token_ids == expected_output(prompt, request.sampling.max_tokens)


def test_the_halves_are_tried_in_turn_and_the_rest_goes_on() -> None:
    batcher = make_batcher(max_num_seqs=4)
    requests = added(batcher, "abcd", max_tokens=1)
    failing = Failing(batcher, {"c"})
    failing.run()
    assert failing.tried == ["abcd!", "ab", "cd!", "c!", "d"]
    assert failing.blamed == [["c"]]
    for request in requests:
        if request.request_id != "c":
            assert_right(request)


@pytest.mark.parametrize("at", range(16))
def test_one_among_sixteen_costs_two_passes_a_halving(at: int) -> None:
    names = "abcdefghijklmnop"
    batcher = make_batcher(max_num_seqs=16, num_blocks=128, max_num_batched_tokens=128)
    requests = added(batcher, names)
    failing = Failing(batcher, set())
    failing.step()  # they decode now
    failing.guilty = {names[at]}
    failing.run()
    assert failing.blamed == [[names[at]]]
    assert failing.tried[1] == f"{names}!"
    search = failing.tried[1:10]
    assert [name.endswith("!") for name in search].count(True) == 5 == "".join(failing.tried).count("!")
    assert sorted("".join(name for name in search if name.isalpha())) == sorted(set(names) - {names[at]})
    for request in requests:
        if request.request_id != names[at]:
            assert_right(request)


def test_several_are_found() -> None:
    batcher = make_batcher(max_num_seqs=8, num_blocks=128)
    requests = added(batcher, "abcdefgh")
    failing = Failing(batcher, {"b", "c", "h"})
    failing.run()
    assert sorted(failing.blamed) == [["b"], ["c"], ["h"]]
    for request in requests:
        if request.finish_reason is not FinishReason.ERROR:
            assert_right(request)


def test_a_fault_that_follows_no_request_ends_all_of_the_pass() -> None:
    batcher = make_batcher(max_num_seqs=16, num_blocks=128, max_num_batched_tokens=128)
    added(batcher, "abcdefghijklmnop")
    failing = Failing(batcher, {ANY})
    failing.run()
    assert [len(blamed) for blamed in failing.blamed] == [16]
    assert len(failing.tried) == 2 * (16).bit_length()


def test_a_fault_that_does_not_come_again_ends_nobody() -> None:
    batcher = make_batcher(max_num_seqs=4)
    requests = added(batcher, "abcd")
    failing = Failing(batcher, {ANY})
    failing.step()
    failing.guilty = set()
    failing.run()
    assert failing.tried[:4] == ["abcd!", "ab", "cd", "abcd"]
    for request in requests:
        assert_right(request)


def test_nobody_new_is_admitted_while_a_fault_is_searched_for() -> None:
    batcher = make_batcher(max_num_seqs=8)
    added(batcher, "ab")
    failing = Failing(batcher, {"b"})
    failing.step()
    batcher.add(make_request("new", 5, arrival=9))
    failing.run()
    assert [*failing.tried[:3], set(failing.tried[3])] == ["ab!", "a", "b!", set("anew")]


def test_who_ends_or_waits_again_meanwhile_is_not_tried() -> None:
    batcher = make_batcher(max_num_seqs=4)
    added(batcher, "abcd")
    failing = Failing(batcher, {ANY})
    failing.step()
    for name in "ac":
        batcher.finish(name, FinishReason.ABORT)
    failing.guilty = {"d"}
    failing.run()
    assert failing.tried[1:3] == ["b", "d!"]
    assert failing.blamed == [["d"]]


def test_all_of_the_suspects_may_end_by_themselves() -> None:
    batcher = make_batcher(max_num_seqs=2)
    added(batcher, "ab")
    failing = Failing(batcher, {ANY})
    failing.step()
    assert batcher.is_isolating
    for name in "ab":
        batcher.finish(name, FinishReason.ABORT)
    assert not batcher.is_isolating
    failing.guilty = set()
    batcher.add(make_request("c", 5, arrival=3))
    failing.run()
    assert failing.tried[1] == "c"


def test_a_group_that_gets_no_blocks_is_passed_over() -> None:
    """The oldest waits for blocks that spent requests hold: alone it cannot be tried."""
    batcher = make_batcher(max_num_seqs=2, num_blocks=4, max_model_len=12, max_preemptions=1)
    old, spent = make_request("a", 4, arrival=0, max_tokens=8), make_request("b", 2, arrival=1, max_tokens=5)
    spent.preemptions.append((0.0, "recompute"))
    batcher.add(old)
    batcher.add(spent)
    failing = Failing(batcher, set())
    while not (old.num_computed_tokens == 8 or batcher.running.get("b") is None):
        failing.step()
    failing.guilty = {ANY}
    failing.step()
    failing.guilty = set()
    failing.run()
    assert old.status is spent.status is RequestStatus.FINISHED
    for request in (old, spent):
        assert_right(request)
