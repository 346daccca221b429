"""The whole engine as on a GPU, played back on a CPU: steps launched ahead, chains of drafts beside them."""

from __future__ import annotations

import asyncio

import pytest
import torch

from engine.compute.drafters.draft_model import DraftModelDrafter, DraftSizes
from engine.plan.speculation.speculative_decoder import DraftSource
from engine.plan.step_records import DraftInputs, Int64
from tests.bench.gpu.engines import made_engine, read, settings_for, submit_all
from tests.bench.gpu.made_models import (
    BLOCK_SIZE,
    make_model,
    make_tokenizer,
    make_walk,
    random_walk,
    strayed,
)
from tests.bench.gpu.sizes import SMALL
from tests.support import played_back

CPU = torch.device("cpu")
VOCAB = SMALL.large.vocab
WALK = random_walk(VOCAB)
NUM_TOKENS = 60
STARTS = (5, 77, 400)


def walked(token_id: int) -> list[int]:
    """What the target says after this token."""
    found = []
    for _ in range(NUM_TOKENS):
        token_id = int(WALK[token_id])
        found.append(token_id)
    return found


@pytest.mark.parametrize("schedule", ["sync", "async"])
async def test_every_token_is_the_targets_whatever_was_drafted(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    played_back.play_back_targets(monkeypatch)
    target = make_model(SMALL.large.config(), torch.float32, CPU, 128)
    draft = make_model(SMALL.small.config(tied=False), torch.float32, CPU, 128)
    make_walk(target, WALK)
    make_walk(draft, strayed(WALK, 0.8))
    sizes = DraftSizes(VOCAB, 64, BLOCK_SIZE, max_num_seqs=4)
    drafter = DraftModelDrafter(draft, sizes, on_device=played_back.on_device(draft, sizes))
    known, num_unread = DraftInputs.known, 0

    def counted(drafts: DraftInputs, tokens: Int64) -> DraftInputs:
        nonlocal num_unread
        num_unread += 1
        return known(drafts, tokens)

    monkeypatch.setattr(DraftInputs, "known", counted)
    flags = ("--speculative-method", "auto", "--draft-length-policy", "fixed")
    settings = settings_for(4, 128, *flags, "--speculation-schedule", schedule)
    sources = (DraftSource(drafter, 4),)
    async with made_engine(settings, target, make_tokenizer(VOCAB), sources) as made:
        streams = submit_all(made.engine, [[9] * 30 + [start] for start in STARTS], NUM_TOKENS)
        found = await asyncio.gather(*(read(stream) for stream in streams))
        stats = made.engine.metrics.speculation
    assert [token_ids for _, token_ids in found] == [walked(start) for start in STARTS]
    drafter.check_integrity()
    if schedule == "sync":  # chains of four, each right four times of five: 59 %
        assert stats.num_rounds < len(STARTS) * NUM_TOKENS / 2
        assert 0.4 < stats.acceptance_rate < 0.8
        assert num_unread > 10, "steps are launched before their drafts are read"
    else:
        assert num_unread == 0
