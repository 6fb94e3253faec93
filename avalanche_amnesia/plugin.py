"""Base class of this package's plugins."""

from typing import Any

from avalanche.core import SupervisedPlugin


class Plugin(SupervisedPlugin):
    """Base class of this package's plugins, of which Avalanche does not warn in a process group."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(supports_distributed=True, **kwargs)
