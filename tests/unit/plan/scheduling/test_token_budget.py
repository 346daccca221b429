from engine.plan.scheduling.step_planner import TokenBudget


def test_prefill_gets_what_decodes_leave() -> None:
    budget = TokenBudget(max_tokens=10, max_prefill=10, max_rows=10, num_decode_tokens=3)
    assert budget.prefill_left == 7
    assert budget.take_chunk(5) == 5
    assert budget.take_chunk(5) == 2
    assert budget.take_chunk(5) == 0
    assert (budget.num_decode_tokens, budget.num_prefill_tokens) == (3, 7)


def test_prefill_has_its_own_limit() -> None:
    budget = TokenBudget(max_tokens=10, max_prefill=4, max_rows=10)
    assert budget.take_chunk(3) == 3
    assert budget.prefill_left == 1
    budget.num_decode_tokens = 6
    assert budget.prefill_left == 1
    assert budget.take_chunk(3) == 1


def test_prefill_and_drafts_share_what_is_left_to_them_beside_decodes() -> None:
    budget = TokenBudget(max_tokens=64, max_prefill=64, max_rows=64, num_decode_tokens=4)
    budget.limit_others(10)
    assert budget.take_chunk(7) == 7
    assert (budget.prefill_left, budget.left) == (3, 3)
    budget.limit_others(100)
    assert budget.prefill_left == 3, "a limit is never raised"


def test_a_draft_takes_a_token_and_a_row_of_which_the_scarcer_counts() -> None:
    budget = TokenBudget(max_tokens=64, max_prefill=64, max_rows=12, num_decode_tokens=4)
    assert budget.drafts_left == 8, "each decode has a row"
    budget.take_chunk(40)
    assert budget.drafts_left == 8, "a prompt that is not through has none"
    budget.num_sampling_chunks = 2
    assert budget.drafts_left == 6
    budget.take_chunk(15)
    assert budget.drafts_left == budget.left == 5
    budget.num_draft_tokens = 3
    assert budget.drafts_left == 2
