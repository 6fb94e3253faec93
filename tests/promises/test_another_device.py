"""Everything runs on another device than the CPU, with reproducible bits."""

import json
from multiprocessing import get_context

import pytest
import torch
from support.far_device import COMPILER, REGISTERS, compiled
from support.far_device.lives import LIVES, ROUNDED, largest_differences
from support.forked import forked


def found_by(process, path):
    """What :func:`largest_differences` wrote: of every life, and of none that it failed."""
    process.join()
    assert process.exitcode == 0
    found = json.loads(path.read_text())
    assert found.keys() == {*LIVES, *ROUNDED}
    assert {name: value for name, value in found.items() if isinstance(value, str)} == {}
    return found


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.skipif(not REGISTERS, reason="this torch takes no device of one's own from Python")
def test_lives_on_another_device_end_with_the_same_bits(request, tmp_path):
    library, path = compiled(request.config.cache.mkdir("far_device")), tmp_path / "found.json"
    found = found_by(forked(largest_differences, "far", library, path), path)
    assert {name: found[name] for name in LIVES if found[name] != 0} == {}
    assert {name: found[name] for name in ROUNDED if found[name] > 1e-2} == {}


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_lives_on_a_gpu_come_to_the_same_bits_again(monkeypatch, tmp_path):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    path = tmp_path / "found.json"
    process = get_context("spawn").Process(target=largest_differences, args=("cuda", None, path))
    process.start()
    assert {name: value for name, value in found_by(process, path).items() if value != 0} == {}
