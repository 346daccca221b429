"""What length policies promise, whatever they were told: lengths within limits, and nothing raised."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from engine.plan.speculation.acceptance import Acceptance, MethodPrior
from engine.plan.speculation.controller import make_length_policy
from engine.plan.speculation.length_policy import Candidate, StepLoad
from engine.plan.speculation.pass_costs import PassCosts
from engine.plan.speculation.speculation_config import LengthPolicyName, SpeculationConfig
from tests.support.examples import share_of

POLICIES: st.SearchStrategy[LengthPolicyName] = st.sampled_from(["fixed", "threshold", "goodput"])
EXAMPLES = settings(max_examples=share_of(40), deadline=None)
# By request: drafts on its tape, and how many of those that are verified are accepted at most.
TAPES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=6)
Step = tuple[list[tuple[int, int]], int, int, float]
STEPS: st.SearchStrategy[list[Step]] = st.lists(
    st.tuples(TAPES, st.integers(0, 60), st.sampled_from([0, 0, 300]), st.sampled_from([0.0, 0.004])),
    max_size=12,
)


@EXAMPLES
@given(POLICIES, st.integers(1, 32), st.sampled_from([0.0, 0.3]), st.booleans(), STEPS)
def test_lengths_are_within_all_limits(
    name: LengthPolicyName, max_drafts: int, min_rate: float, are_trees: bool, steps: list[Step]
) -> None:
    costs, prior = PassCosts(), MethodPrior()
    config = SpeculationConfig(1000, max_drafts, length_policy=name, min_acceptance_rate=min_rate)
    policy = make_length_policy(config, costs)
    requests = [Acceptance(prior) for _ in range(6)]
    for tapes, room, num_prefill, draft_s in steps:
        num_seqs = len(tapes) + 1
        load = StepLoad(num_seqs, num_seqs + num_prefill, num_prefill, room, draft_s)
        candidates = [
            Candidate(request, available, is_tree=are_trees)
            for request, (available, _) in zip(requests, tapes, strict=False)
        ]
        lengths = policy.lengths(candidates, load)
        assert len(lengths) == len(candidates)
        assert sum(lengths) <= room
        for length, candidate, (available, agreeing) in zip(lengths, candidates, tapes, strict=True):
            assert 0 <= length <= min(available, max_drafts)
            accepted = min(length, agreeing)
            if length and are_trees:
                policy.observe_tree(candidate.acceptance, length, range(accepted))
            elif length:
                policy.observe(candidate.acceptance, length, accepted)
        costs.observe(num_seqs, num_seqs + sum(lengths), 0.01 + 0.001 * room)
        for request in requests:
            for limit in (0, 1, 50):
                assert 0 <= policy.wanted(request, limit, draft_s) <= min(limit, max_drafts)


@EXAMPLES
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), max_size=40), st.booleans())
def test_survival_never_increases_and_is_a_chance(rounds: list[tuple[int, int]], is_tree: bool) -> None:
    acceptance = Acceptance(MethodPrior())
    for num_proposed, agreeing in rounds:
        accepted = min(num_proposed, agreeing)
        if is_tree:
            acceptance.observe_tree(num_proposed, range(num_proposed - accepted, num_proposed))
        else:
            acceptance.observe(num_proposed, accepted)
        survival = acceptance.survival(16)
        assert all(0 <= chance <= 1 for chance in survival)
        assert survival == sorted(survival, reverse=True)
        assert acceptance.survival(5) == survival[:5]
        assert 0 <= acceptance.rate <= 1 and 0 <= acceptance.round_rate <= 1


@EXAMPLES
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 300), st.floats(1e-5, 10)), min_size=1),
    st.integers(1, 64),
)
def test_costs_never_sink_with_more_tokens(seen: list[tuple[int, int, float]], num_seqs: int) -> None:
    costs = PassCosts()
    for seqs, more, seconds in seen:
        costs.observe(seqs, seqs + more, seconds)
    run = costs.run(num_seqs, num_seqs, 400)
    assert run is not None
    assert run[0] > 0
    assert (run[1:] >= run[:-1]).all()
