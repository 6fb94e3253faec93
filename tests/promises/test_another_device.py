"""Everything runs on another device than the CPU, with reproducible bits."""

import json
import tempfile
import traceback
import warnings
from functools import partial
from multiprocessing import get_context

import pytest
import torch
from support.far_device import COMPILER, REGISTERS, compiled, register
from support.forked import forked
from support.stock_hosts import HOSTS, host
from support.strategies import DIGITS, BatchNormedConvNet, learn, make, mlp, quiet
from torch.optim import SGD, Adam

from avalanche_amnesia.benchmarks import UnlearningRequest, with_unlearning
from avalanche_amnesia.contrib.metrics import membership_metrics, relapse_metrics
from avalanche_amnesia.contrib.repair import RepairPlugin
from avalanche_amnesia.contrib.shadows import BackupPlugin
from avalanche_amnesia.evaluation import References, jsd_metrics
from avalanche_amnesia.isolation import Pools
from avalanche_amnesia.training import (
    HAT,
    WSN,
    AdaHAT,
    AdaHATRule,
    AdjustmentRule,
    AmnesiacHAT,
    DisjointSubnets,
    HardAttention,
)
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.host.saving import load_state
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin

REQUESTS = with_unlearning(DIGITS, [UnlearningRequest((0,), 1, "iteration", 3), UnlearningRequest((1,), 2, "after")])


def made(kind, device, *, net=BatchNormedConvNet, optimizer=Adam, **options):
    rate = 0.1 if optimizer is SGD else 1e-2
    return make(kind, net=net, optimizer=partial(optimizer, lr=rate), device=device, **options)


def life(kind, *, requests=True, **options):
    """Tasks, requests between and in the middle of them, a saved state."""

    def lived(device):
        strategy = learn(made(kind, device, **options), REQUESTS if requests else DIGITS, 3 if requests else 2)
        strategy.eval(DIGITS.test_stream[:3])
        if requests:
            with tempfile.TemporaryDirectory() as folder:
                strategy.save(folder)
                loaded = made(kind, device, **options)
                load_state(loaded, folder)
            record = loaded.unlearn([2])
            assert record.claim == "exact" or "isolation" not in options, record.plan.reasons
            strategy = loaded
            strategy.train(DIGITS.train_stream[3])
        return strategy.model.state_dict()

    return lived


def stock(name):
    def lived(device):
        strategy = learn(host(name, device=torch.device(device)), DIGITS.train_stream[:2])
        plugin = find_plugin(strategy, UnlearningPlugin)
        plugin.unlearn(strategy, [0])
        strategy.train(DIGITS.train_stream[2])
        return strategy.model.state_dict()

    return lived


def measures(device):
    references = References(lambda **options: made(AmnesiacHAT, device, **options), REQUESTS)
    metrics = [jsd_metrics(references), relapse_metrics(REQUESTS, references), membership_metrics(REQUESTS, references)]
    evaluator = quiet()
    evaluator.metrics += [metric for group in metrics for metric in group]
    strategy, found = made(AmnesiacHAT, device, evaluator=evaluator), {}
    for experience in REQUESTS.train_stream[:3]:
        strategy.train(experience)
        found |= {k: v for k, v in strategy.eval(REQUESTS.test_stream[:3]).items() if isinstance(v, float)}
    return {name: torch.tensor(value) for name, value in found.items() if "time" not in name.lower()}


LIVES = {
    "HAT, gradients": life(HAT, requests=False, adjustment=AdjustmentRule(space="gradient"), net=mlp, optimizer=SGD),
    "HAT, budget": life(HAT, requests=False, masks=HardAttention(budget="even", fit_head=True)),
    "AdaHAT, no_reg": life(AdaHAT, requests=False, adjustment=AdaHATRule(sparsity=False), optimizer=SGD),
    "AmnesiacHAT": life(AmnesiacHAT),
    "shadows and repair": life(AmnesiacHAT, compensation=BackupPlugin, repair=RepairPlugin),
    "DisjointSubnets": life(DisjointSubnets, isolation=Pools(slots=5)),
    # SI rounds otherwise, and PackNet prunes other weights, here and there.
    **{name: stock(name) for name in HOSTS if name not in ("si", "packnet", "ewc", "replay", "er-ace")},
}
ROUNDED = {
    "AdaHAT, SGD": life(AdaHAT, requests=False, optimizer=SGD),
    "WSN": life(WSN),
    "si": stock("si"),
    "measures": measures,
}
"""Other steps of the optimizer, sparsities as other numbers, sums in another order: the same but for rounding."""


def largest_differences(device, library, result):
    """Write as JSON how far every life on ``far``, whose library is given, is from the CPU's, or what went wrong.

    Another device rounds as it likes: there it is how far a life is from the same once more.
    """
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if library:
        register(library)
    warnings.simplefilter("ignore")
    found = {}
    for name, lived in {**LIVES, **ROUNDED}.items():
        try:
            one, other = ({k: v.cpu() for k, v in lived(d).items()} for d in (device, "cpu" if library else device))
            assert one.keys() == other.keys()
            moved = [(one[k].double() - other[k].double()).abs().nan_to_num() for k in one if one[k].numel()]
            found[name] = max(float(values.max()) for values in moved)
        except Exception:
            found[name] = traceback.format_exc(limit=-4)
    result.write_text(json.dumps(found))


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
