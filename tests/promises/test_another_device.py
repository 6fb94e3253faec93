"""Everything runs on another device than the CPU, under autocast and where channels lie last; bits are reproducible."""

import json
import tempfile
import traceback
import warnings
from functools import partial
from multiprocessing import get_context

import pytest
import torch
from support import tiny
from support.far_device import COMPILER, REGISTERS, compiled, register
from support.forked import forked
from support.small_runs import assert_retained
from support.stock_hosts import HOSTS, host
from support.strategies import DIGITS, BatchNormedConvNet, learn, make, mlp, quiet
from support.strategy_state import bits, unlearning_plugin
from torch.optim import SGD, Adam

from avalanche_amnesia import DisjointModel, MaskedModel, SubnetModel
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
        find_plugin(strategy, UnlearningPlugin).unlearn(strategy, [0])
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


def in_bfloat16(kind):
    class LowPrecision(kind):
        def forward(self):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward()

    return LowPrecision


def laid_out(kind, how, **options):
    torch.manual_seed(0)
    model = {WSN: SubnetModel, DisjointSubnets: DisjointModel}.get(kind, MaskedModel)(BatchNormedConvNet())
    if how == "channels last":
        model = model.to(memory_format=torch.channels_last)
    return make(in_bfloat16(kind) if how == "bfloat16" else kind, model=model, **options)


HOWS = ["bfloat16", "channels last"]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", [AmnesiacHAT, WSN])
def test_earlier_tasks_keep_their_bits(kind, how):
    strategy = laid_out(kind, how)
    assert_retained(strategy, DIGITS, 3)
    assert strategy.model.backbone.second.weight.is_contiguous() == (how != "channels last")


@pytest.mark.parametrize("how", HOWS)
def test_weight_pools_unlearn_to_the_bit(how):
    factory = partial(laid_out, DisjointSubnets, how)
    strategy = learn(factory(), DIGITS, 4)
    # A subclass that casts is the script's own.
    assert strategy.unlearn([1]).claim == ("conditional" if how == "bfloat16" else "exact")
    strategy.train(DIGITS.train_stream[4])
    assert strategy.unlearn([2, 3]).claim != "approximate"
    reference = References(factory, DIGITS).reference(unlearning_plugin(strategy).ledger.remaining)
    assert bits(strategy.model) == bits(reference)


@pytest.mark.parametrize("kind", [AmnesiacHAT, WSN])
def test_weights_in_channels_last_order_are_saved_and_unlearned(kind, tmp_path):
    strategy, loaded = laid_out(kind, "channels last"), laid_out(kind, "channels last")
    learn(strategy, DIGITS.train_stream[:3])
    strategy.save(tmp_path / "state")
    load_state(loaded, tmp_path / "state")
    for one in (strategy, loaded):
        one.train(DIGITS.train_stream[3])
        one.unlearn([1])
    assert bits(loaded.model) == bits(strategy.model)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_autocast_around_a_strategy_leaves_its_state_in_float32(kind):
    stream = tiny.tasks([[0, 1], [2, 3], [1, 0]]).train_stream
    strategy, plain = tiny.strategy(kind), tiny.strategy(kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        strategy.train(stream)
        strategy.eval(stream)
        record = strategy.unlearn(task=1, samples=[0, 2]) if kind == "pools" else strategy.unlearn([0])
        assert torch.is_autocast_enabled("cpu")
    types = {value.dtype for value in strategy.model.state_dict().values() if value.is_floating_point()}
    assert types == {torch.float32}
    plain.train(stream)
    assert bits(plain.model) != bits(strategy.model)  # forwards were not whole
    assert record.claim == ("exact" if kind == "pools" else "approximate")
    if kind == "pools":  # trained again at other settings than before
        assert "other settings" in strategy.unlearn(task=2, samples=[0], reproduce=False).plan.reasons[0]
