"""Where the servers are. Nothing here may need more than pytest: the clients decide what is installed."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--scripted-url", default="http://127.0.0.1:8000")
    parser.addoption("--default-url", default="http://127.0.0.1:8000")
    parser.addoption("--node", default="nowhere")
    parser.addoption("--tokenizer", default="nowhere")  # a folder with the default model's


@pytest.fixture(scope="session")
def scripted(pytestconfig: pytest.Config) -> str:
    """A model that calls the first tool it is shown, and answers behind the result."""
    return str(pytestconfig.getoption("--scripted-url"))


@pytest.fixture(scope="session")
def default(pytestconfig: pytest.Config) -> str:
    """The default model, with its default template."""
    return str(pytestconfig.getoption("--default-url"))


@pytest.fixture(params=["scripted", "default"])
def either(request: pytest.FixtureRequest) -> str:
    """Each of them."""
    return str(request.getfixturevalue(request.param))
