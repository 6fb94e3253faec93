"""What every test needs: one thread, and the real data where there is some."""

import os
from pathlib import Path

import pytest
import torch

pytest.register_assert_rewrite("lives")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The data root: AMNESIA_DATA, or shared/data beside the repository."""
    given = os.environ.get("AMNESIA_DATA")
    root = Path(given) if given else Path(__file__).parents[1].parent / "shared" / "data"
    if not root.is_dir():
        pytest.skip("no data root: set AMNESIA_DATA")
    return root
