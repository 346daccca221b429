"""What of the settings the decoder is made with."""

from __future__ import annotations

from pathlib import Path

import pytest

from config import load_settings
from engine.compute.drafters.draft_loader import TargetRoom
from engine.errors import StartRefused
from engine.plan.kv.paged_kv_manager import PagedKvManager
from engine.startup.build_speculation import load_sources, make_decoder, model_free_sources
from tests.support.packed import load_tiny

KV = PagedKvManager(num_blocks=8, block_size=4, max_num_seqs=2, max_blocks_per_seq=4)


def test_the_two_marks_of_acceptance_reach_the_decoder() -> None:
    flags = ("--min-acceptance-rate", "0.1", "--draft-shrink-rate", "0.7")
    settings = load_settings(flags, {})
    decoder = make_decoder(settings, tuple(model_free_sources(settings.speculation)), 100, KV)
    assert decoder is not None
    assert (decoder.config.min_acceptance_rate, decoder.config.draft_shrink_rate) == (0.1, 0.7)


def test_without_sources_there_is_no_decoder() -> None:
    assert make_decoder(load_settings(("--speculative-method", "none"), {}), (), 100, KV) is None


@pytest.mark.parametrize("family", ["hrm_text", "gemma3n"])
def test_heads_for_a_model_of_several_lists_of_layers_or_streams_are_refused(
    family: str, tmp_path: Path
) -> None:
    settings = load_settings(("--draft-heads", str(tmp_path)), {})
    with pytest.raises(StartRefused, match=r"--draft-heads: .* has not one list of layers"):
        load_sources(settings, load_tiny(family), tmp_path, TargetRoom(4, 16, 1 << 20))
