"""Files that are replaced as a whole."""

import os
from pathlib import Path


def replace_file(file: Path, content: bytes) -> None:
    """Write a file as a whole or not at all: killed at any moment, there is the old one or the new one."""
    part = file.with_name(f"{file.name}.part")
    with part.open("wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())
    os.replace(part, file)
