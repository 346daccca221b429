"""Which device is asked for by which word, and what is said of one that is not there."""

from __future__ import annotations

import pytest
import torch

from engine.compute.loading.loader import choose_device
from engine.compute.runner.device import make_current
from engine.errors import StartRefused


def see(monkeypatch: pytest.MonkeyPatch, count: int, current: int = 0) -> list[torch.device]:
    """Pretend so many GPUs; the list has those that were made current."""
    made: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "set_device", made.append)
    return made


@pytest.mark.parametrize(
    ("asked", "expected"),
    [("auto", "cuda:1"), ("cuda", "cuda:1"), ("cuda:0", "cuda:0"), ("cuda:2", "cuda:2"), ("cpu", "cpu")],
)
def test_a_gpu_is_the_one_named_or_the_current_one(
    asked: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(monkeypatch, count=3, current=1)
    assert choose_device(asked) == torch.device(expected)


def test_without_a_gpu_auto_is_the_cpu_and_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, count=0)
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    for asked in ("cuda", "cuda:0", "cuda:1"):
        with pytest.raises(StartRefused, match=f"^--device {asked}: no CUDA device is available"):
            choose_device(asked)


@pytest.mark.parametrize(
    ("count", "there"), [(1, "one CUDA device, cuda:0"), (4, "4 CUDA devices, cuda:0 to cuda:3")]
)
def test_a_number_beyond_those_there_is_refused_with_how_many_there_are(
    count: int, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(monkeypatch, count)
    with pytest.raises(StartRefused) as refused:
        choose_device(f"cuda:{count}")
    assert str(refused.value) == (
        f"--device cuda:{count}: there is no such device; this process sees {there}."
    )


def test_only_a_gpu_is_made_current(monkeypatch: pytest.MonkeyPatch) -> None:
    made = see(monkeypatch, count=2)
    make_current(torch.device("cpu"))
    make_current(torch.device("cuda", 1))
    assert made == [torch.device("cuda", 1)]
