"""Learn and unlearn with the installed package alone: ``make package`` runs this outside of the repository."""

import importlib.util

import torch
from torch.optim import Adam

import avalanche_amnesia
from avalanche_amnesia import MLP, AmnesiacHAT, MaskedModel, SplitDigits

assert "site-packages" in avalanche_amnesia.__file__
assert importlib.util.find_spec("cryptography") is None, "an extra is installed: this shows nothing of doing without"
torch.manual_seed(0)
model = MaskedModel(MLP(64, hidden=(64,), features=32))
strategy = AmnesiacHAT(model=model, optimizer=Adam(model.parameters()), train_mb_size=64, isolation="pools")
for experience in SplitDigits(n_train=300, n_test=100).train_stream[:2]:
    strategy.train(experience)
assert strategy.unlearn([0]).claim == "exact"
