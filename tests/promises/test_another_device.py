"""Everything runs on a device that is not the CPU, and comes to the bits that the CPU comes to."""

import json

import pytest
from support.far_device import COMPILER, REGISTERS, compiled
from support.far_device.lives import LIVES, ROUNDED, largest_differences
from support.forked import forked


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.skipif(not REGISTERS, reason="this torch takes no device of one's own from Python")
def test_lives_on_another_device_end_with_the_same_bits(request, tmp_path):
    library = compiled(request.config.cache.mkdir("far_device"))
    process = forked(largest_differences, library, tmp_path / "found.json")
    process.join()
    assert process.exitcode == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.keys() == {*LIVES, *ROUNDED}
    assert {name: value for name, value in found.items() if isinstance(value, str)} == {}
    assert {name: found[name] for name in LIVES if found[name] != 0} == {}
    assert {name: found[name] for name in ROUNDED if found[name] > 1e-2} == {}
