"""Learn and unlearn with the installed package and no extra: ``make package`` runs this outside of the repository."""

import importlib
import importlib.util
import pkgutil
import subprocess
import sys
from pathlib import Path

import torch
from torch.optim import Adam

import avalanche_amnesia
from avalanche_amnesia import MLP, AmnesiacHAT, MaskedModel, References, SplitDigits, jsd_metrics, with_unlearning

WAY_OUT = 'pip install "avalanche-amnesia[lab]"'

assert "site-packages" in avalanche_amnesia.__file__
for extra in ("cryptography", "shtab"):
    assert importlib.util.find_spec(extra) is None, f"{extra} is installed: this shows nothing of doing without"

for module in pkgutil.walk_packages(avalanche_amnesia.__path__, "avalanche_amnesia.", onerror=lambda name: None):
    if not module.name.startswith("avalanche_amnesia.lab"):
        importlib.import_module(module.name)
assert not [name for name in sys.modules if name.startswith("avalanche_amnesia.lab")]

said = ""
try:
    import avalanche_amnesia.lab
except ImportError as error:
    said = str(error)
assert WAY_OUT in said
assert "\n" not in said
for command in ([Path(sys.executable).with_name("amnesia")], [sys.executable, "-m", "avalanche_amnesia"]):
    done = subprocess.run([*command, "--help"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("amnesia: ")
    assert WAY_OUT in done.stderr
    assert len(done.stderr.splitlines()) == 1


def make_strategy(**options):
    torch.manual_seed(0)
    model = MaskedModel(MLP(64, hidden=(64,), features=32))
    optimizer = Adam(model.parameters())
    return AmnesiacHAT(model=model, optimizer=optimizer, train_mb_size=64, **options)


benchmark = with_unlearning(SplitDigits(n_train=300, n_test=100), requests={1: [0]})
references = References(make_strategy, benchmark)
strategy = make_strategy()
for experience in benchmark.train_stream[:2]:
    strategy.train(experience)
assert strategy.unlearn([1]).claim == "exact"
assert jsd_metrics(references) != []
assert references.reference([1]) is not None
assert "units in" in str(strategy.model.describe())
