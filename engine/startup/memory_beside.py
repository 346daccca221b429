"""What else will lie on a GPU beside the target's weights and K/V, told before any of it is loaded.

Seats are derived from it, and K/V leaves it room.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from config import ModelSettings, Settings
from engine.compute.cuda.coded_choice import kept_kinds
from engine.compute.cuda.graphs.recorded_rounds import recorded_round_bytes
from engine.compute.cuda.graphs.step_graphs import graph_bytes
from engine.compute.cuda.weight_rounding import foresee_rounding
from engine.compute.drafters.draft_loader import (
    TargetRoom,
    draft_graphs,
    draft_kv_bytes,
    draft_model_settings,
    draft_sizes,
    is_on_host,
    with_context,
)
from engine.compute.drafters.drafter_weights import eagle_bytes, medusa_bytes, medusa_logits, mtp_bytes
from engine.compute.drafters.eagle import MOST_ROWS
from engine.compute.drafters.eagle_layer import NUM_FEATURES
from engine.compute.drafters.eagle_loader import Slabs, foresee_eagle_kv
from engine.compute.drafters.mtp_loader import foresee_mtp_kv
from engine.compute.loading.loader import LoadedModel
from engine.compute.loading.locate import FoundModel, find_model
from engine.compute.loading.model_source import beside_model, resolve_model
from engine.compute.loading.outline import NoOutline, outline_model, read_stored, weight_bytes
from engine.compute.loading.quantized_files import foresee_codes
from engine.compute.loading.support import Architecture, weight_format_of
from engine.compute.runner.model_runner import ForDrafts
from engine.embeddings.service import BATCH_TOKENS
from engine.errors import StartRefused
from engine.startup.build_speculation import (
    eagle_room,
    find_heads,
    find_module,
    foreseen_draft_tokens,
    told_bytes,
)
from engine.startup.step_sizes import NOTHING_BESIDE, MemoryBeside, numbers_of_token

log = logging.getLogger("slipstream.engine")
_Told = TypeVar("_Told")
# Rows are drawn for in groups of 2^22 logits (`in_groups`), in about 40 bytes for each.
_BYTES_OF_A_DRAW = 40 << 22


class DrafterMemory(NamedTuple):
    """The bytes of a drafter's weights, what it keeps beside a target with some room, and what it reads."""

    weights: int
    kept: Callable[[TargetRoom], int]
    reads: ForDrafts = ForDrafts()


def foresee_memory_beside(
    settings: Settings, target: LoadedModel, directory: Path | None, *, may_fetch: bool = True
) -> MemoryBeside:
    """What a start will load beside the target, which may be an outline, in `directory`; nothing on a CPU.

    What cannot be told counts as nothing: who loads it says why. With `may_fetch` models that are not on this
    machine yet are fetched, as loading them would.
    """
    if target.device.type != "cuda":
        return NOTHING_BESIDE
    told = (
        _told(lambda: _draft_model(settings, target, may_fetch=may_fetch)),
        _told(lambda: foresee_reader(settings, target, directory)),
    )
    drafters = [drafter for drafter in told if drafter is not None]
    most_drafts = foreseen_draft_tokens(settings)

    def held(room: TargetRoom) -> int:
        """Features of the target's sequences, for drafters that read them, and what these compute in."""
        seats = room.max_num_seqs
        return sum(
            each.reads.held_bytes(target, seats, most_drafts)
            + round_bytes(settings, target, each.reads, seats)
            for each in drafters
        )

    return MemoryBeside(
        sum(drafter.weights for drafter in drafters),
        _told(lambda: _embedding_bytes(settings.model, may_fetch=may_fetch)) or 0,
        (*(drafter.kept for drafter in drafters), held) if drafters else (),
    )


def round_bytes(settings: Settings, target: LoadedModel, reads: ForDrafts, num_seqs: int) -> int:
    """About what drafters that read so many sequences' features of `target` compute in at a time.

    Heads that read no layers have logits of all their tokens for each sequence, as they are computed and
    beside each other, and draw by groups of sequences.

    A layer computes its round beside the target's pass, in a stream of its own, so that neither has the
    other's memory.

    The features of a round's rows are copied, and a row has about ten more of the hidden width: its states
    and norms, queries, keys and values, and queries that are turned. The MLP of an EAGLE layer is computed
    for the last row of each sequence alone; a module is a whole layer of the target's for every row. Behind
    the layer there are the logits of each sequence, as it gives them, as numbers of 32 bits and as chances,
    and what a group of those that sample is drawn by.
    """
    width, heads = target.dtype.itemsize, settings.speculation.medusa_heads
    if not reads.feature_layers:
        if not reads.keeps_features or heads is None:
            return 0
        return 2 * num_seqs * medusa_logits(heads, target) * width + _BYTES_OF_A_DRAW
    num_rows = min(MOST_ROWS, num_seqs * reads.feature_window)
    hidden, num_layers = int(target.config.hidden_size), len(reads.feature_layers)
    of_row = 5 * hidden + numbers_of_token(target.config) if num_layers == 1 else 10 * hidden
    drawn = num_seqs * target.vocab_size * (width + 8) + _BYTES_OF_A_DRAW
    return num_rows * num_layers * hidden * width + max(num_rows * of_row * width, drawn)


def outline_draft_model(asked: ModelSettings, source: FoundModel, max_model_len: int) -> LoadedModel | None:
    """What a draft model will be beside a target of such a context; None where nothing of it is here yet.

    Raises StartRefused, NoOutline.
    """
    stored = read_stored(source)
    if stored is None:
        return None
    architecture, dtype = stored
    outline = outline_model(architecture, dtype, with_context(asked, architecture, max_model_len))
    foresee_codes_kept(outline, asked, None if source.pending else source.directory, architecture)
    return outline


def foresee_codes_kept(
    outline: LoadedModel, settings: ModelSettings, directory: Path | None, architecture: Architecture
) -> str | None:
    """Have an outline take what a GPU keeps of its weights as codes; in words, where a start rounds to them.

    `directory` None: its files are not here.
    """
    kinds, rounding = kept_kinds(outline.device, settings), settings.quantization
    if kinds and rounding != "none":
        return foresee_rounding(outline.model, rounding)
    weight_format = weight_format_of(architecture.config)
    if kinds and weight_format is not None and directory is not None:
        foresee_codes(outline.model, directory, weight_format, kinds)
    return None


def _told(tell: Callable[[], _Told | None]) -> _Told | None:
    try:
        return tell()
    except (StartRefused, NoOutline) as reason:
        log.debug("no memory is set aside: %s", reason)
        return None


def _draft_model(settings: Settings, target: LoadedModel, *, may_fetch: bool) -> DrafterMemory | None:
    speculation = settings.speculation
    if speculation.draft_model is None or speculation.speculative_method not in ("auto", "draft-model"):
        return None
    if is_on_host(settings, target):
        return None  # it takes none of the GPU's memory
    asked = draft_model_settings(settings)
    if may_fetch:
        resolve_model(asked, settings.home)
    outline = outline_draft_model(asked, find_model(asked, settings.home), target.max_model_len)
    if outline is None:
        return None

    def kept(room: TargetRoom) -> int:
        sizes = draft_sizes(outline, target.vocab_size, room)
        told = told_bytes(settings, target, room.max_num_seqs)
        return draft_kv_bytes(outline, sizes) + graph_bytes(outline, draft_graphs(outline, sizes)) + told

    return DrafterMemory(weight_bytes(outline.model), kept)


def foresee_reader(settings: Settings, target: LoadedModel, directory: Path | None) -> DrafterMemory | None:
    """What reads the target's features: as `load_sources` chooses it. Raises StartRefused."""
    speculation, method = settings.speculation, settings.speculation.speculative_method
    if method in ("auto", "medusa") and speculation.medusa_heads is not None:
        reads = ForDrafts(keeps_features=True)
        return DrafterMemory(medusa_bytes(speculation.medusa_heads, target), lambda _: 0, reads)
    if method in ("auto", "heads") and (heads := find_heads(speculation, target)) is not None:
        return _of_slabs(target, eagle_bytes(heads, target), foresee_eagle_kv(heads, target), NUM_FEATURES)
    layout = find_module(speculation, target, directory) if method in ("auto", "mtp") else None
    if layout is None or directory is None:
        return None
    return _of_slabs(target, mtp_bytes(directory, target, layout), foresee_mtp_kv(target), 1)


def _of_slabs(target: LoadedModel, weights: int, slabs: Slabs, num_layers: int) -> DrafterMemory:
    """That of a layer with these slabs which reads so many of the target's, whichever they are."""
    reads = ForDrafts("match", True, tuple(range(num_layers)), slabs.window)

    def kept(room: TargetRoom) -> int:
        of_drafter, width = eagle_room(room), num_layers * int(target.config.hidden_size)
        recorded = recorded_round_bytes(target, width, slabs.count(of_drafter))
        return slabs.num_bytes(of_drafter) + recorded

    return DrafterMemory(weights, kept, reads)


def _embedding_bytes(settings: ModelSettings, *, may_fetch: bool) -> int:
    """Its weights, and what its largest pass is computed in: a batch, or one text that is longer.

    Without the masks of a model that needs padding, which shows only in running it.
    """
    if settings.embedding_model is None:
        return 0
    from engine.compute.embedding.embedder import describe_embedder  # a start without one goes without it
    from engine.compute.embedding.folder import read_folder
    from engine.compute.embedding.source import find_embedding_model, resolve_embedding_model

    asked = beside_model(settings, settings.embedding_model)
    directory = resolve_embedding_model(asked) if may_fetch else find_embedding_model(asked)
    if directory is None:
        return 0
    described = describe_embedder(read_folder(directory), asked)
    of_token = numbers_of_token(described.config) * described.dtype.itemsize
    return described.weight_bytes + max(BATCH_TOKENS, described.max_model_len) * of_token
