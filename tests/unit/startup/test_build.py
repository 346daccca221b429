"""What the parts of an engine are put together with."""

from concurrent.futures import ThreadPoolExecutor

import torch

from engine.startup.build import use_compute_threads


def test_compute_threads_take_what_is_too_small_for_zero() -> None:
    """All of them, those that torch begins for a large tensor, too."""

    def smallest() -> float:
        use_compute_threads()
        return float((torch.full((1 << 22,), 2e-38) * 0.1).max())

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(smallest).result() == 0.0
