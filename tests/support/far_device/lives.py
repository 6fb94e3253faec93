"""Lives of strategies on another device than the CPU, and the same on the CPU."""

import json
import tempfile
import traceback
import warnings

import torch
from torch import nn
from torch.optim import SGD, Adam

from avalanche_amnesia.benchmarks import UnlearningRequest, with_unlearning
from avalanche_amnesia.contrib.metrics import membership_metrics, relapse_metrics
from avalanche_amnesia.contrib.repair import RepairPlugin
from avalanche_amnesia.contrib.shadows import BackupPlugin
from avalanche_amnesia.evaluation import References, jsd_metrics
from avalanche_amnesia.isolation import Pools
from avalanche_amnesia.models import MLP, DisjointModel, MaskedModel, SubnetModel
from avalanche_amnesia.training import (
    HAT,
    WSN,
    AdaHAT,
    AdaHATRule,
    AdjustmentRule,
    AmnesiacHAT,
    DisjointSubnets,
    HardAttention,
    ScoredWeights,
)
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.host.saving import load_state
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin
from support.far_device import register
from support.stock_hosts import HOSTS, host
from support.strategies import DIGITS, learn, quiet, with_plugins

REQUESTS = with_unlearning(DIGITS, [UnlearningRequest((0,), 1, "iteration", 3), UnlearningRequest((1,), 2, "after")])


class Net(nn.Module):
    """Convolutions and BatchNorm; dropout would draw other numbers on another device."""

    features = 12

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.third = nn.Conv2d(6, 10, 3, stride=2), nn.Linear(10 * 9, 12)

    def forward(self, x):
        x = torch.relu(self.second(torch.relu(self.norm(self.first(x)))))
        return torch.relu(self.third(torch.flatten(x, 1)))


def made(kind, device, *, net=Net, optimizer=Adam, **options):
    torch.manual_seed(0)
    model = {WSN: SubnetModel, DisjointSubnets: DisjointModel}.get(kind, MaskedModel)(net())
    options = {"train_mb_size": 40, "train_epochs": 2, **with_plugins(options)}
    steps = optimizer(model.parameters(), lr=0.1 if optimizer is SGD else 1e-2)
    return kind(model=model, optimizer=steps, device=device, **options)


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


def linear():
    return MLP(64, hidden=(24,), features=16)


LIVES = {
    "HAT, gradients": life(HAT, requests=False, adjustment=AdjustmentRule(space="gradient"), net=linear, optimizer=SGD),
    "HAT, budget": life(HAT, requests=False, masks=HardAttention(budget="even", fit_head=True)),
    "AdaHAT, no_reg": life(AdaHAT, requests=False, adjustment=AdaHATRule(sparsity=False), optimizer=SGD),
    "AmnesiacHAT": life(AmnesiacHAT),
    "shadows and repair": life(AmnesiacHAT, compensation=BackupPlugin, repair=RepairPlugin),
    "WSN, codes": life(  # its own Adam is fused where torch has that
        WSN, masks=ScoredWeights(score_optimizer=lambda p: Adam(p, lr=1e-3), score_bits=2, keep="best"), optimizer=SGD
    ),
    "DisjointSubnets": life(DisjointSubnets, isolation=Pools(slots=5)),
    # SI rounds otherwise, and PackNet prunes other weights, here and there.
    **{name: stock(name) for name in HOSTS if name not in ("si", "packnet", "ewc", "replay", "er-ace")},
}
ROUNDED = {
    "AdaHAT, SGD": life(AdaHAT, requests=False, optimizer=SGD),
    "WSN, fused": life(WSN),
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
