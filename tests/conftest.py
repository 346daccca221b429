"""What holds in tests of every kind: torch on one thread, a quarter of a property's examples.

Kernels are compiled once, and kept for the next run in pytest's cache."""

from __future__ import annotations

import gc
import shutil
import sys
from collections.abc import Iterator

import pytest

from tests.support import compile_ahead, compile_once
from tests.support.by_default import mark_the_others_slow
from tests.support.examples import register_profiles

register_profiles()


def pytest_configure(config: pytest.Config) -> None:
    """Where tests run in several processes, the one that starts the others, which take on its PATH."""
    if hasattr(config, "workerinput"):
        from engine.compute.lean_transformers import prepare_transformers

        prepare_transformers()  # as servers do; every test of these imports it sooner or later
        return
    kept = config.cache.mkdir("compiled") if hasattr(config, "cache") else None
    if (folder := compile_once.put_first(kept)) is None:
        return
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if is_whole and getattr(config.option, "numprocesses", None):
        config.add_cleanup(compile_ahead.start())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Looks for no garbage in what is collected: there is none, and it takes a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before markers select: the default suite runs few cases of a test that says so."""
    mark_the_others_slow(config, items)


@pytest.fixture(autouse=True, scope="module")
def known_heap() -> None:
    """What modules before have left is exempt from garbage collection, as what is loaded is in a server.

    After some thousand tests a full collection takes two seconds: enough for a request to miss its deadline,
    and for a grammar to be charged with them.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_numbers() -> Iterator[None]:
    """What torch draws without a seed of its own is a test's own, whatever ran before it in this process.

    Numbers below the normal range of floats are numbers again after a test that made an engine here.
    """
    if "torch" in sys.modules:
        import torch

        torch.manual_seed(0)
    yield
    if "torch" in sys.modules:
        import torch

        torch.set_flush_denormal(False)


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
