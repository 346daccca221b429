"""What holds in tests of every kind: torch on one thread, half of a property's examples."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.support.examples import register_profiles

register_profiles()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Torch on one thread, in engines too: tiny models gain nothing from more, and lose to other workers.

    Whatever the module before has left behind. This loads no torch where no test has.
    """
    if "torch" not in sys.modules:
        yield
        return
    import torch

    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        if "engine.startup.build" in sys.modules:
            patch.setattr("engine.startup.build.usable_cores", lambda: 1)
            patch.setattr("engine.startup.build.whole_cores", lambda: 1)
        yield
