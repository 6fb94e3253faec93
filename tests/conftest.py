"""Surroundings of the tests, in processes that run some; and the real data where there is some."""

import importlib
import os
from pathlib import Path

import pytest

pytest.register_assert_rewrite("support")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of workers and of programs that tests start: they share the cores


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Load what tests need where tests run: the process that deals them out would import the host for nothing."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(importlib.import_module("support.surroundings"))


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The data root: AMNESIA_DATA, or shared/data beside the repository."""
    given = os.environ.get("AMNESIA_DATA")
    root = Path(given) if given else Path(__file__).parents[1].parent / "shared" / "data"
    if not root.is_dir():
        pytest.skip("no data root: set AMNESIA_DATA")
    return root


@pytest.fixture
def every_entry_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step leaves entries out however few they are."""
    monkeypatch.setattr("avalanche_amnesia.unit_graph.masking.WORTH_IT", 0)
    monkeypatch.setattr("avalanche_amnesia.unit_graph.graph._MUCH_LESS", 0.999)
