"""Rows of `slipstream doctor` that this machine may have no reason to show."""

from engine import DeviceFacts
from server.commands.doctor.view import _device


def facts(*thread_counts: int) -> DeviceFacts:
    return DeviceFacts("cpu", "", "no CUDA device", {"AVX2": True}, "AVX2", True, 16, thread_counts)


def test_threads_are_named_only_where_there_is_a_choice() -> None:
    assert "threads" not in dict(_device(facts(16), None))
    assert (
        dict(_device(facts(16, 8, 15), None))["threads"] == "a start tries 16, 8, 15, and keeps the fastest"
    )
