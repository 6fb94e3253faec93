"""Surroundings of every test: one thread, streams that start alike, and the real data where there is some."""

import atexit
import gc
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.register_assert_rewrite("support")

from support.shared_traces import SharedTraces  # noqa: E402 - rewritten

from avalanche_amnesia.unit_graph import tracing  # noqa: E402

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the programs that tests start: they share the cores
for _look in ("WANDB_X_DISABLE_META", "WANDB_X_DISABLE_STATS", "WANDB_X_DISABLE_MACHINE_INFO"):
    os.environ.setdefault(_look, "true")  # W&B looks over the whole machine at every run's start
os.environ.setdefault("WANDB_X_SAVE_REQUIREMENTS", "false")
if not torch.accelerator.is_available():  # manual_seed keeps pytest's deep stack at every call, which takes 5 ms
    torch.manual_seed = torch.default_generator.manual_seed


gc.collect()
gc.freeze()  # what was imported stays: garbage is not looked for there, which takes half a second each time
atexit.register(gc.unfreeze)  # else libraries tell of leaks at the very end


@pytest.fixture(autouse=True)
def the_same_start() -> None:
    """Whatever ran before, a test finds the same: hosts and networks draw from the global streams."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the global stream is the one that hosts draw from


@pytest.fixture(scope="session", autouse=True)
def traces_of_all_workers(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Networks that a worker has traced are not traced by the others."""
    if "PYTEST_XDIST_WORKER" in os.environ:  # without workers the folder above is that of other sessions
        folder = tmp_path_factory.getbasetemp().parent / "traces"
        tracing._known = SharedTraces(folder)


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The data root: AMNESIA_DATA, or shared/data beside the repository."""
    given = os.environ.get("AMNESIA_DATA")
    root = Path(given) if given else Path(__file__).parents[1].parent / "shared" / "data"
    if not root.is_dir():
        pytest.skip("no data root: set AMNESIA_DATA")
    return root
