"""Environment of every test: one thread, the same random seeds, traces shared between pytest workers."""

import atexit
import gc
import os
import random
import sys
import traceback

import numpy as np
import pytest
import torch
import wandb.sdk.launch  # noqa: F401 - the start of a run imports it, slowly if many modules are loaded
from torch.fx import proxy

from avalanche_amnesia.models import MaskedModel
from avalanche_amnesia.unit_graph import tracing
from support import forked
from support.shared_traces import SharedTraces
from support.strategies import mlp


class KeptFrames:
    """The part of torch.fx's CapturedTraceback that torch.fx uses."""

    @staticmethod
    def extract() -> type["KeptFrames"]:
        return KeptFrames

    @staticmethod
    def summary() -> traceback.StackSummary:
        frame, kept = sys._getframe(1), traceback.StackSummary()
        while frame is not None:
            code = frame.f_code
            if code.co_name == "forward" or code.co_filename == torch.__file__:
                kept.append(traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name))
            frame = frame.f_back
        kept.reverse()
        return kept


def take_kept_frames() -> None:
    """Make torch.fx use KeptFrames, if this version of torch keeps only those frames."""
    if hasattr(proxy.TracerBase, "_record_forward_stack_traces_only"):
        proxy.CapturedTraceback = KeptFrames


for _look in ("WANDB_X_DISABLE_META", "WANDB_X_DISABLE_STATS", "WANDB_X_DISABLE_MACHINE_INFO"):
    os.environ.setdefault(_look, "true")  # W&B inspects the whole machine at the start of a run
os.environ.update(WANDB_SILENT="true", WANDB_CONSOLE="off")
os.environ.setdefault("WANDB_X_SAVE_REQUIREMENTS", "false")
if not torch.accelerator.is_available():  # manual_seed saves pytest's deep stack, which takes 5 ms
    torch.manual_seed = torch.default_generator.manual_seed
take_kept_frames()

gc.set_threshold(20_000, 20, 20)  # collecting garbage more often takes 4 % of the time
gc.collect()
gc.freeze()  # skips imported objects: half a second at each collection
atexit.register(gc.unfreeze)  # otherwise libraries report leaks at exit


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the fork server after all test modules are imported and before the first test."""
    if session.config.getoption("collectonly"):
        return
    MaskedModel(mlp())  # the first export takes a second, and this one's trace is known in every forked process
    gc.collect()
    gc.freeze()  # the test modules and their imports
    forked.begin_server()


@pytest.fixture(autouse=True)
def the_same_start() -> None:
    """Seed the global random generators, because Avalanche and networks draw from them."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - Avalanche draws from the global generator


@pytest.fixture(scope="session", autouse=True)
def traces_of_all_workers(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Share each worker's traces with all workers."""
    if "PYTEST_XDIST_WORKER" in os.environ:  # without workers the parent folder belongs to other sessions
        folder = tmp_path_factory.getbasetemp().parent / "traces"
        tracing._known = SharedTraces(folder)
