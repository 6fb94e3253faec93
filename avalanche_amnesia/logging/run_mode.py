"""Default mode of a W&B run: online only if that can work without a question."""

import netrc
import os
from pathlib import Path
from typing import Any, Literal, cast, get_args
from urllib.parse import urlsplit

Mode = Literal["online", "offline", "disabled"]
MODES = get_args(Mode)
_OLD_NAMES = {"run": "online", "dryrun": "offline"}
"""Names that WANDB_MODE still takes."""


def resolve_mode(mode: str | None) -> Mode:
    """The mode for `wandb.init`, found without network and without a prompt."""
    if mode is not None:
        if mode not in MODES:
            raise ValueError(f"mode={mode!r} is no W&B mode: pass one of {MODES}, or None to choose by WANDB_MODE")
        return cast(Mode, mode)
    # Read here because wandb keeps the environment of its first use in the process.
    if variable := os.environ.get("WANDB_MODE"):
        variable = _OLD_NAMES.get(variable, variable)
        if variable not in MODES:
            raise ValueError(f"WANDB_MODE={variable!r} is no W&B mode: set one of {MODES}, or pass mode=")
        return cast(Mode, variable)

    import wandb

    settings = wandb.setup().settings
    if settings.mode in MODES and settings.mode != "online":
        return cast(Mode, settings.mode)
    return "online" if _has_credentials(settings) else "offline"


def _has_credentials(settings: Any) -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE") or settings.api_key:
        return True
    host = urlsplit(settings.base_url).netloc
    # W&B's cloud has moved hosts; entries for the old one still log in.
    hosts = [host, "api.wandb.ai"] if host.endswith((".coreweave.com", ".wandb.ai")) else [host]
    return any(_netrc_has(name) for name in hosts)


def _netrc_has(host: str) -> bool:
    given = os.environ.get("NETRC")
    for path in [given] if given else ["~/.netrc", "~/_netrc"]:
        try:
            entry = netrc.netrc(str(Path(path).expanduser())).authenticators(host)
        except (OSError, netrc.NetrcParseError):
            continue
        if entry is not None and entry[2]:
            return True
    return False
