"""Rows of `slipstream doctor` that this machine may have no reason to show."""

from types import SimpleNamespace
from typing import Any

from engine import CacheFacts, DeviceFacts, ModelFacts
from server.commands.doctor.view import _device, _memory, _model


def facts(*thread_counts: int) -> DeviceFacts:
    return DeviceFacts("cpu", "", "no CUDA device", {"AVX2": True}, "AVX2", True, 16, thread_counts)


def test_threads_are_named_only_where_there_is_a_choice() -> None:
    assert "threads" not in dict(_device(facts(16), None))
    assert (
        dict(_device(facts(16, 8, 15), None))["threads"] == "a start tries 16, 8, 15, and keeps the fastest"
    )


def test_how_a_model_is_sampled_by_default_is_told_where_it_says_so() -> None:
    model = ModelFacts("m", "built in", None, None)
    assert "sampling" not in dict(_model(model))
    model.default_sampling = {"temperature": 0.2, "top_p": 0.9}
    assert dict(_model(model))["sampling"] == "temperature 0.2, top_p 0.9 where a request does not say"


def test_what_a_gpu_needs_beside_its_tensors_is_told_by_its_size() -> None:
    cache, model = (
        CacheFacts(64, 64, 1 << 30, "--gpu-memory-utilization", 1, 4, 0, 0, 0),
        ModelFacts("m", "", None, None),
    )
    for work, beside in ((0, "work space"), (3 << 30, "about 3.00 GiB to compute in and for recorded steps")):
        report: Any = SimpleNamespace(engine=SimpleNamespace(needed_bytes=2 << 30, work_bytes=work))
        assert dict(_memory(report, model, cache))["together"] == f"2.00 GiB, and {beside}"
