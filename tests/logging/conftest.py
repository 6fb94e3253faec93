from collections.abc import Iterator
from pathlib import Path

import pytest
from support.wandb_files import Recorder


@pytest.fixture(autouse=True)
def quiet_wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the W&B login of the user who runs the tests."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for variable in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    made = Recorder(tmp_path)
    yield made
    made.logger.finish()
