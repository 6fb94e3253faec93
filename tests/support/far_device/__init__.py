"""A device beside the CPU, ``far``, for machines without an accelerator; see ``far.cpp``.

``compiled`` makes its library with the machine's compiler; ``register`` loads it, for good: in a process of its own.
"""

import shutil
import subprocess
from pathlib import Path

import torch
from torch.utils import backend_registration, cpp_extension

SOURCE = Path(__file__).with_name("far.cpp")
COMPILER = shutil.which("g++") or shutil.which("c++")
REGISTERS = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


def compiled(folder):
    """The library, made in a folder unless it is there already for this version of torch."""
    library = folder / f"far-{torch.__version__}-{SOURCE.stat().st_mtime_ns}.so"
    if not library.exists():
        include = [f"-I{path}" for path in cpp_extension.include_paths()]
        found = [f"-L{path}" for path in cpp_extension.library_paths()]
        command = [COMPILER, "-std=c++20", "-O0", "-w", "-fPIC", "-shared", *include, str(SOURCE), "-o", str(library)]
        subprocess.run([*command, *found, "-ltorch", "-ltorch_cpu", "-lc10"], check=True, capture_output=True)
    return library


class Module:
    """What torch asks a device's module."""

    is_available = is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    manual_seed_all = staticmethod(lambda seed: None)


def register(library):
    """Let torch know the device."""
    torch.ops.load_library(str(library))
    backend_registration._setup_privateuseone_for_python_backend("far", backend_module=Module)
    clone = torch.UntypedStorage.clone

    def cloned(storage):  # torch's own can't, and copy.deepcopy asks for it
        if storage.device.type != "far":
            return clone(storage)
        view = torch.empty(0, dtype=torch.uint8, device="far").set_(storage, 0, (storage.nbytes(),), (1,))
        return view.clone().untyped_storage()

    torch.UntypedStorage.clone = cloned
