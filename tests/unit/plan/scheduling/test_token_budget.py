from engine.plan.scheduling.token_budget import TokenBudget


def test_decodes_are_limited_by_their_own_limit_and_by_what_is_reserved() -> None:
    assert TokenBudget(max_tokens=16, max_prefill=16, max_decodes=4).decode_limit(0) == 4
    assert TokenBudget(max_tokens=16, max_prefill=16, max_decodes=64).decode_limit(0) == 16
    assert TokenBudget(max_tokens=16, max_prefill=16, max_decodes=64).decode_limit(6) == 10


def test_prefill_gets_what_decodes_leave() -> None:
    budget = TokenBudget(max_tokens=10, max_prefill=10, max_decodes=10)
    budget.take_decodes(3)
    assert budget.prefill_left == 7
    assert budget.take_chunk(5) == 5
    assert budget.take_chunk(5) == 2
    assert budget.take_chunk(5) == 0
    assert (budget.num_decode_tokens, budget.num_prefill_tokens) == (3, 7)


def test_prefill_has_its_own_limit() -> None:
    budget = TokenBudget(max_tokens=10, max_prefill=4, max_decodes=10)
    assert budget.take_chunk(3) == 3
    assert budget.prefill_left == 1
    budget.take_decodes(6)
    assert budget.prefill_left == 1
    assert budget.take_chunk(3) == 1


def test_prefill_and_drafts_share_what_is_left_to_them_beside_decodes() -> None:
    budget = TokenBudget(max_tokens=64, max_prefill=64, max_decodes=64)
    budget.take_decodes(4)
    budget.limit_others(10)
    assert budget.take_chunk(7) == 7
    assert (budget.prefill_left, budget.drafts_left) == (3, 3)
    budget.limit_others(100)
    assert budget.prefill_left == 3, "a limit is never raised"
