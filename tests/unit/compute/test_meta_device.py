"""Which torch is imported without its kernels for the meta device."""

from __future__ import annotations

import sys

import pytest

from engine.compute import meta_device


@pytest.mark.parametrize(
    ("version", "defers"), [("2.13.0+cpu", True), ("2.11.0+cu130", False), ("2.130.0", False)]
)
def test_kernels_wait_in_the_torch_that_was_tried_alone(
    version: str, defers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another one more may come with them, as generators of random numbers do in this one."""
    monkeypatch.setattr(meta_device, "version", lambda _: version)
    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    meta_device.defer_kernels()
    assert bool(sys.meta_path) == defers
