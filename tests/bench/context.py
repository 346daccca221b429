"""What the benchmarks of one report share: the settings, the model, the number of runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from config import Settings
from engine.compute.loading.model_source import resolve_model
from tests.bench.peer import Peer
from tests.bench.workloads import Words


@dataclass(frozen=True)
class BenchContext:
    """`flags` are those of `slipstream serve`; `settings` is what they and the environment ask for.

    `say` shows what is being measured. The same model serves every benchmark of a report. `peers` are engines
    to be measured beside ours, `gguf_files` what `llama_server` and ours are compared on.
    """

    settings: Settings
    flags: tuple[str, ...]
    runs: int
    say: Callable[[str], None]
    peers: tuple[Peer, ...] = ()
    gguf_files: tuple[Path, ...] = ()
    llama_server: Path | None = None

    @cached_property
    def model_directory(self) -> Path:
        """The weights, converted if need be."""
        return resolve_model(self.settings.model, self.settings.home)

    @cached_property
    def words(self) -> Words:
        """The model's one-token words."""
        return Words.of(self.model_directory)
