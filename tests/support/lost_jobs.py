"""A job that loses its process; imports nothing that takes long, as every try is a process of its own."""

import os
import signal
from pathlib import Path


def ended(mark: str, times: int) -> int:
    """Ends its own process so often, without a result."""
    marks = Path(mark)
    marks.mkdir(exist_ok=True)
    if len(list(marks.iterdir())) < times:
        (marks / str(os.getpid())).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()
