"""Which attention a device gets; whatever is in the way of the fast one is named and never fatal."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from engine.compute.attention import CpuAttention, ReferenceAttention, choice, choose_backend
from engine.compute.attention.layer_kv import LayerKv

CUDA = torch.device("cuda", 0)
BIASED = [LayerKv(1, 16, 16, biased=True)]


def refusal(caplog: pytest.LogCaptureFixture) -> str:
    """The one line that says why CUDA got the reference."""
    with caplog.at_level(logging.INFO, logger="slipstream"):
        assert isinstance(choose_backend(CUDA), ReferenceAttention)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    return record.getMessage()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of torch with CUDA and a GPU of today."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_other_devices_have_their_own() -> None:
    assert isinstance(choose_backend(torch.device("cpu")), CpuAttention)
    assert isinstance(choose_backend(torch.device("meta")), ReferenceAttention)


def test_a_bias_by_position_has_no_compiled_kernel(caplog: pytest.LogCaptureFixture) -> None:
    rows: Any = object()
    on_cpu = choose_backend(torch.device("cpu"), rows, layers=BIASED)
    assert isinstance(on_cpu, CpuAttention) and on_cpu._rows is None
    with caplog.at_level(logging.INFO, logger="slipstream"):
        assert isinstance(choose_backend(CUDA, layers=BIASED), ReferenceAttention)
    assert "ALiBi" in caplog.text


def test_torch_without_cuda(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert refusal(caplog).endswith("this build of torch is not for CUDA")


def test_an_old_gpu(cuda: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "compute capability is (7, 5)" in refusal(caplog)


def test_no_triton(cuda: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    assert "triton is not installed" in refusal(caplog)


def test_whatever_a_first_step_raises(
    cuda: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("\nno compiler\nand a long story")

    monkeypatch.setattr(choice, "_triton", fail)
    assert refusal(caplog).endswith("slow reference: no compiler")
