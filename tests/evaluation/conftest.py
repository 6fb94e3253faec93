import pytest
from support.measured_runs import BENCHMARK, make

from avalanche_amnesia.evaluation import References


@pytest.fixture(scope="module")
def references() -> References:
    return References(make, BENCHMARK)
