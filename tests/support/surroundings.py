"""Surroundings of every test: one thread, streams that start alike, traces that all of pytest's workers share."""

import atexit
import gc
import os
import random

import numpy as np
import pytest
import torch
import wandb.sdk.launch  # noqa: F401 - a run's start imports it, which takes the longer the more there is already

from avalanche_amnesia.models import MLP, MaskedModel
from avalanche_amnesia.unit_graph import tracing
from support import forked
from support.shallow_stacks import take_kept_frames
from support.shared_traces import SharedTraces

for _look in ("WANDB_X_DISABLE_META", "WANDB_X_DISABLE_STATS", "WANDB_X_DISABLE_MACHINE_INFO"):
    os.environ.setdefault(_look, "true")  # W&B looks over the whole machine at every run's start
os.environ.update(WANDB_SILENT="true", WANDB_CONSOLE="off")
os.environ.setdefault("WANDB_X_SAVE_REQUIREMENTS", "false")
if not torch.accelerator.is_available():  # manual_seed keeps pytest's deep stack at every call, which takes 5 ms
    torch.manual_seed = torch.default_generator.manual_seed
take_kept_frames()

gc.set_threshold(20_000, 20, 20)  # tests make much and keep little: looking for garbage that often is 4 % of their time
gc.collect()
gc.freeze()  # what was imported stays: garbage is not looked for there, which takes half a second each time
atexit.register(gc.unfreeze)  # else libraries tell of leaks at the very end


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin what lives as long as the tests, once all their modules are imported and nothing has run."""
    if session.config.getoption("collectonly"):
        return
    MaskedModel(MLP(3, hidden=(3,), features=3))  # torch.export's first use takes a second, in every forked process too
    gc.collect()
    gc.freeze()  # the tests' own modules, and what they imported
    forked.begin_server()


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
