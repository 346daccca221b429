"""What the parts of an engine are put together with."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from config import load_settings
from engine.errors import StartRefused
from engine.startup.build import load_parts, use_compute_threads, use_memory_nodes
from engine.startup.doctor import diagnose
from tests.support.tiny_models import save_tiny_model

MIB = 1 << 20


def test_compute_threads_take_what_is_too_small_for_zero() -> None:
    """All of them, those that torch begins for a large tensor, too."""

    def smallest() -> float:
        use_compute_threads()
        return float((torch.full((1 << 22,), 2e-38) * 0.1).max())

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(smallest).result() == 0.0


@pytest.mark.parametrize(
    ("device", "nodes", "expected"), [("cpu", (0, 1), [(0, 1)]), ("cpu", (0,), []), ("cuda", (0, 1), [])]
)
def test_memory_is_spread_where_several_nodes_compute(
    monkeypatch: pytest.MonkeyPatch, device: str, nodes: tuple[int, ...], expected: list[tuple[int, ...]]
) -> None:
    spread: list[tuple[int, ...]] = []
    monkeypatch.setattr("engine.startup.build.usable_nodes", lambda: nodes)
    monkeypatch.setattr("engine.startup.build.spread_memory", spread.append)
    use_memory_nodes(torch.device(device))
    assert spread == expected


@dataclass
class GaugeOfSixteenMib:
    """A device that is empty but for 2 MiB; each step takes 1 MiB."""

    measured: list[int] = field(default_factory=list)

    def free_and_total(self) -> tuple[int, int]:
        return 14 * MIB, 16 * MIB

    def peak(self, work: Callable[[], None]) -> int:
        work()
        self.measured.append(MIB)
        return MIB


def test_all_parts_have_the_sizes_that_the_devices_memory_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gauge = GaugeOfSixteenMib()
    for module in ("build", "doctor"):
        monkeypatch.setattr(f"engine.startup.{module}.gauge_of", lambda device: gauge)
    model = save_tiny_model("llama", tmp_path)
    flags = ("--compile", "off", "--dtype", "float32", "--max-num-batched-tokens", "512")
    settings = load_settings([str(model), *flags], {})
    found, parts = diagnose(settings), load_parts(settings)
    info, config = parts.info, parts.batcher.config
    assert len(gauge.measured) == 2, "a prompt step with all rows of logits and a decode step, once"
    assert (info.max_num_seqs, info.max_num_batched_tokens, info.kv_block_size) == (96, 512, 64)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (96, 512)
    assert (config.max_decode_seqs, config.max_prefill_tokens) == (96, 512)
    assert config.max_logits_rows == info.max_logits_rows == (512 << 20) // (info.vocab_size * 4)
    block_bytes = info.kv_bytes // info.num_kv_blocks
    assert info.num_kv_blocks == (int(0.9 * 16 * MIB) - 2 * MIB - MIB) // block_bytes
    origins = [origin.partition(":")[0] for origin in info.size_origins.values()]
    assert origins == ["derived", "given", "derived"]
    assert found.cache is not None and found.cache.size_origins == info.size_origins
    assert (found.cache.max_num_seqs, found.cache.kv_block_size) == (96, 64)


NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    MemoryError(),
]


def start_with(error: Exception, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading the drafters fails so."""

    def load(*_: object) -> tuple[()]:
        raise error

    monkeypatch.setattr("engine.startup.build.load_sources", load)
    load_parts(load_settings([str(save_tiny_model("llama", directory)), "--compile", "off"], {}))


@pytest.mark.parametrize("error", NO_MEMORY)
def test_drafters_that_find_no_memory_refuse_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with pytest.raises(StartRefused, match=r"Memory has ended while .+: .+\. Lower --kv-cache-memory"):
        start_with(error, tmp_path, monkeypatch)


def test_other_faults_of_loading_refuse_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="a defect"):
        start_with(RuntimeError("a defect"), tmp_path, monkeypatch)
