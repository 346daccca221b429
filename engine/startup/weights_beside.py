"""WeightsBeside: what else will lie on a GPU beside the target's weights, told before any of it is loaded.

Seats are derived from it, and K/V leaves it room.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from config import ModelSettings, Settings
from engine.compute.cuda.coded_choice import kept_kinds
from engine.compute.cuda.weight_rounding import foresee_rounding
from engine.compute.drafters.drafter_weights import eagle_bytes, medusa_bytes, mtp_bytes
from engine.compute.loading.loader import LoadedModel
from engine.compute.loading.locate import find_model
from engine.compute.loading.model_source import resolve_model
from engine.compute.loading.outline import NoOutline, outline_model, read_stored, weight_bytes
from engine.compute.loading.quantized_files import foresee_codes
from engine.compute.loading.support import Architecture, weight_format_of
from engine.errors import StartRefused
from engine.startup.build_speculation import find_heads, find_module

log = logging.getLogger("slipstream.engine")


@dataclass(frozen=True, slots=True)
class WeightsBeside:
    """About the bytes of weights: those of all drafters, and those of the embedding model."""

    drafts: int = 0
    embeddings: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.drafts + self.embeddings


def foresee_weights_beside(
    settings: Settings, target: LoadedModel, directory: Path | None, *, may_fetch: bool = True
) -> WeightsBeside:
    """What a start will load beside the target, which may be an outline, in `directory`; nothing on a CPU.

    What cannot be told counts as nothing: who loads it says why. With `may_fetch` models that are not on this
    machine yet are fetched, as loading them would.
    """
    if target.device.type != "cuda":
        return WeightsBeside()
    return WeightsBeside(
        _told(lambda: _draft_model_bytes(settings, may_fetch=may_fetch))
        + _told(lambda: _reader_bytes(settings, target, directory)),
        _told(lambda: _embedding_bytes(settings.model, may_fetch=may_fetch)),
    )


def beside_model(settings: ModelSettings, name: str) -> ModelSettings:
    """The settings of another model that a start loads, on the same device: its files' own in the rest."""
    return settings.model_copy(update={"model": name, "revision": None, "max_model_len": None})


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


def _told(count: Callable[[], int]) -> int:
    try:
        return count()
    except (StartRefused, NoOutline) as reason:
        log.debug("no memory is set aside for weights: %s", reason)
        return 0


def _draft_model_bytes(settings: Settings, *, may_fetch: bool) -> int:
    speculation = settings.speculation
    if speculation.draft_model is None or speculation.speculative_method not in ("auto", "draft-model"):
        return 0
    asked = beside_model(settings.model, speculation.draft_model)
    if may_fetch:
        resolve_model(asked, settings.home)
    source = find_model(asked, settings.home)
    stored = read_stored(source)
    if stored is None:
        return 0
    outline = outline_model(*stored, asked)
    foresee_codes_kept(outline, asked, None if source.pending else source.directory, stored[0])
    return weight_bytes(outline.model)


def _reader_bytes(settings: Settings, target: LoadedModel, directory: Path | None) -> int:
    """Of what reads the target's features: as `load_sources` chooses it."""
    speculation, method = settings.speculation, settings.speculation.speculative_method
    if method in ("auto", "medusa") and speculation.medusa_heads is not None:
        return medusa_bytes(speculation.medusa_heads, target)
    if method in ("auto", "heads") and (heads := find_heads(speculation, target)) is not None:
        return eagle_bytes(heads, target)
    layout = find_module(speculation, target, directory) if method in ("auto", "mtp") else None
    return 0 if layout is None or directory is None else mtp_bytes(directory, target, layout)


def _embedding_bytes(settings: ModelSettings, *, may_fetch: bool) -> int:
    if settings.embedding_model is None:
        return 0
    from engine.compute.embedding.embedder import describe_embedder  # a start without one goes without it
    from engine.compute.embedding.folder import read_folder
    from engine.compute.embedding.source import find_embedding_model, resolve_embedding_model

    asked = beside_model(settings, settings.embedding_model)
    directory = resolve_embedding_model(asked) if may_fetch else find_embedding_model(asked)
    return 0 if directory is None else describe_embedder(read_folder(directory), asked).weight_bytes
