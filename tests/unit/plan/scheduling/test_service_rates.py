import random

import pytest

from engine.plan.scheduling.service_rates import ReplyWork, ServiceRates
from tests.support.factories import make_request


def trained(
    num_steps: int = 400, fixed: float = 0.02, prefill: float = 1e-4, decode: float = 5e-4
) -> ServiceRates:
    model, rng = ServiceRates(), random.Random(0)
    for _ in range(num_steps):
        tokens, decodes = rng.choice((0, 0, 128, 512)), rng.randint(1, 64)
        model.observe(tokens, decodes, fixed + prefill * tokens + decode * decodes)
    return model


def test_nothing_is_known_before_the_first_steps() -> None:
    model = ServiceRates()
    for _ in range(8):
        assert not model.is_known
        assert model.step_s(1, 1) is None
        assert model.prefill_s(1) is None
        assert model.finish_s(ReplyWork(4, 64, 8, 0), [], 1) is None
        model.observe(4, 0, 0.1)
    assert model.is_known
    assert model.step_s(4, 0) == pytest.approx(0.1)


def test_linear_costs_are_found() -> None:
    model = trained()
    assert model.step_s(0, 1) == pytest.approx(0.0205, rel=0.01)
    assert model.step_s(2048, 64) == pytest.approx(0.02 + 0.2048 + 0.032, rel=0.01)
    assert model.prefill_s(1000) == pytest.approx(0.1, rel=0.01)


def test_new_costs_replace_the_old_ones() -> None:
    model, rng = trained(), random.Random(1)
    for _ in range(600):
        decodes = rng.randint(1, 64)
        model.observe(0, decodes, 0.005 + 1e-4 * decodes)
    assert model.step_s(0, 32) == pytest.approx(0.0082, rel=0.05)


def test_one_stall_counts_for_a_few_steps_at_most() -> None:
    model = trained()
    before = model.step_s(0, 1)
    assert before is not None
    model.observe(0, 1, 60.0)
    for _ in range(15):
        model.observe(0, 1, 0.0205)
    after = model.step_s(0, 1)
    assert after is not None
    assert before < after < 1.5 * before


def test_no_cost_is_ever_negative() -> None:
    model = ServiceRates()
    for tokens in (1, 2, 3, 4) * 20:  # more tokens, less time
        model.observe(tokens, 0, 1.0 / tokens)
    costs = [model.step_s(0, 0), model.prefill_s(1)]
    assert all(cost is not None and cost >= 0 for cost in costs)


def test_costs_that_cannot_be_told_apart_make_a_single_request_look_fast() -> None:
    model = ServiceRates()
    for _ in range(100):
        model.observe(0, 64, 0.1)
    one, many = model.step_s(0, 1), model.step_s(0, 64)
    assert one is not None and one <= 0.1 + 1e-9
    assert many == pytest.approx(0.1)


def test_swapping_is_timed_by_the_byte() -> None:
    model = ServiceRates()
    assert model.swap_s(1) is None
    model.observe_swap(1000, 0.5)
    model.observe_swap(3000, 1.5)
    assert model.swap_s(200) == pytest.approx(0.1)


def test_the_time_to_finish_is_the_prompts_chunks_and_one_step_a_further_token() -> None:
    model = trained()
    expected = 0.1 + 2 * 0.02 + 10 * 0.0205
    assert model.finish_s(ReplyWork(1000, 512, 11, 0), [], 1) == pytest.approx(expected, rel=0.01)
    expected = 0.0001 + 0.02 + 9 * 0.0205
    assert model.finish_s(ReplyWork(1, 512, 10, 0), [], 1) == pytest.approx(expected, rel=0.02)
    expected = 0.0001 + 0.02 + 9 * 0.0205 / 3
    assert model.finish_s(ReplyWork(1, 512, 4, 0), [], 1) == pytest.approx(expected, rel=0.02)


def test_steps_take_as_long_as_they_did_by_the_clock() -> None:
    model = trained()
    plain_s = model.decoding_s(10, 8)
    assert plain_s == pytest.approx(10 * 0.024, rel=0.01), "none was timed yet"
    for _ in range(200):
        model.observe_clock(0, 1.0)  # nobody waits for tokens in it
        model.observe_clock(8, 2 * 0.024)
    assert model.decoding_s(10, 8) == pytest.approx(2 * 10 * 0.024, rel=0.05)
    model.observe_clock(8, 60.0)
    after_s = model.decoding_s(10, 8)
    assert after_s is not None
    assert after_s < 2.1 * 10 * 0.024, "a stall is no rate"
    behind = model.finish_s(ReplyWork(1, 512, 10, num_beside=7), [], 8)
    alone = model.finish_s(ReplyWork(1, 512, 10, num_beside=0), [], 8)
    assert behind is not None and alone is not None
    assert behind > 1.1 * alone


@pytest.mark.parametrize(
    ("stop", "stop_token_ids", "min_tokens", "least"),
    [((), frozenset(), 3, 11), ((), {5}, 0, 1), ((), {5}, 3, 3), (("x",), frozenset(), 3, 1)],
)
def test_a_request_that_may_stop_early_is_given_the_benefit_of_the_doubt(
    stop: tuple[str, ...], stop_token_ids: set[int], min_tokens: int, least: int
) -> None:
    request = make_request(
        max_tokens=11, stop=stop, stop_token_ids=frozenset(stop_token_ids), min_tokens=min_tokens
    )
    assert request.least_output_tokens == least


def test_the_prompt_tokens_that_fit_a_step_are_what_its_decodes_leave() -> None:
    assert ServiceRates().prefill_tokens_within(0.15, 4) is None
    model = trained()
    assert model.prefill_tokens_within(0.15, 60) == pytest.approx(1000, rel=0.02)
    assert model.prefill_tokens_within(0.03, 60) == 0


def test_one_long_chunk_tells_its_cost_at_once() -> None:
    model = ServiceRates()
    for _ in range(9):
        model.observe(0, 1, 0.01)
    assert model.prefill_tokens_within(0.15, 1) is None, "no prompt was computed yet"
    model.observe(512, 1, 0.03)
    assert model.prefill_s(512) == pytest.approx(0.02, rel=0.2)
