"""Online only where it can work; looked up without network or prompt."""

from pathlib import Path

import pytest
import wandb

from avalanche_amnesia.logging.wandb import resolve_mode


@pytest.fixture(autouse=True)
def no_login() -> None:
    """wandb remembers the environment of its first use in a process."""
    wandb.teardown()


@pytest.mark.parametrize("mode", ["online", "offline", "disabled"])
def test_said_is_said(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    assert resolve_mode(mode) == mode


@pytest.mark.parametrize(
    ("variable", "mode"),
    [("online", "online"), ("offline", "offline"), ("disabled", "disabled"), ("dryrun", "offline"), ("run", "online")],
)
def test_environment(variable: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", variable)
    assert resolve_mode(None) == mode


def test_unknown_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="mode must be one of 'online', 'offline', 'disabled', got 'cloud'"):
        resolve_mode("cloud")
    monkeypatch.setenv("WANDB_MODE", "cloud")
    with pytest.raises(ValueError, match="WANDB_MODE must be one of 'online', 'offline', 'disabled', got 'cloud'"):
        resolve_mode(None)


def test_nobody_logged_in() -> None:
    assert resolve_mode(None) == "offline"


def test_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert resolve_mode(None) == "online"


@pytest.mark.parametrize(
    ("base_url", "machine", "mode"),
    [
        (None, "api.wandb.ai", "online"),
        ("https://wandb.lab.org", "wandb.lab.org", "online"),
        ("https://wandb.lab.org", "api.wandb.ai", "offline"),
        (None, "github.com", "offline"),
    ],
)
@pytest.mark.parametrize("as_variable", [False, True])
def test_key_in_netrc(
    base_url: str | None,
    machine: str,
    mode: str,
    as_variable: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    file = tmp_path / "other netrc" if as_variable else home / ".netrc"
    file.write_text(f"machine {machine}\n  login user\n  password {'k' * 40}\n")
    file.chmod(0o600)
    if as_variable:
        monkeypatch.setenv("NETRC", str(file))
    if base_url is not None:
        monkeypatch.setenv("WANDB_BASE_URL", base_url)
    assert resolve_mode(None) == mode


def test_broken_netrc(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".netrc").write_text("machine\n\x00 what")
    assert resolve_mode(None) == "offline"
