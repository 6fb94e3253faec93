"""Integers reach the model unchanged, for an embedding: grey levels of digits as tokens."""

import pytest
import torch
from support.strategies import make
from torch import nn

from avalanche_amnesia import DisjointModel, DisjointSubnets
from avalanche_amnesia.benchmarks import SplitDigits, task_benchmark, with_unlearning
from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.contrib.baselines import CLPUDERpp, SideNetworks
from avalanche_amnesia.contrib.repair import RepairPlugin
from avalanche_amnesia.contrib.shadows import BackupPlugin
from avalanche_amnesia.models import MaskedModel, SubnetModel
from avalanche_amnesia.training import WSN, AmnesiacHAT


def stream(dtype=torch.int64, **options):
    parts = [e.tensors for e in SplitDigits(n_train=400, n_test=200).train_stream[:3]]
    x = torch.cat([(x * 16).round().to(dtype).flatten(1) for x, _ in parts])
    y = torch.cat([y + 2 * task for task, (_, y) in enumerate(parts)])
    return task_benchmark((x, y), (x, y), [[0, 1], [2, 3], [4, 5]], **options)


def net():
    torch.manual_seed(0)
    layers = [nn.Embedding(17, 4), nn.Flatten(), nn.Linear(256, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU()]
    return nn.Sequential(*layers)


def masked():
    return MaskedModel(net(), input_shape=(64,))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64])
def test_integers_stay_integers_and_bytes_are_images(dtype):
    experience = stream(dtype).train_stream[1]
    x, _ = experience.tensors
    assert x.dtype == torch.int64
    assert torch.equal(x, (SplitDigits(n_train=400, n_test=200).train_stream[1].tensors[0] * 16).round().flatten(1))
    assert experience.dataset[3][0].dtype == torch.int64
    assert torch.equal(experience.dataset[3][0], x[3])
    assert torch.equal(task_data(experience, torch.tensor([5]))[0][0], x[5])
    assert stream(torch.uint8).train_stream[1].tensors[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("kind", "model", "options"),
    [
        (AmnesiacHAT, masked, {"repair": RepairPlugin, "compensation": BackupPlugin}),
        (DisjointSubnets, lambda: DisjointModel(net(), n_features=16), {}),
        (WSN, lambda: SubnetModel(net(), n_features=16), {}),
        (CLPUDERpp, lambda: SideNetworks(net(), n_features=16), {}),
    ],
)
def test_tokens_are_learned_and_unlearned(kind, model, options):
    model, benchmark = model(), with_unlearning(stream(), permanent=[0] if kind is CLPUDERpp else ())
    strategy = make(kind, model=model, train_mb_size=20, train_epochs=4, **options)
    strategy.train(benchmark.train_stream)
    record = strategy.unlearn([1])
    assert model.tasks == (0, 2)
    assert record.claim == "exact" or kind is not DisjointSubnets
    x, y = benchmark.train_stream[2].tensors
    model.eval()
    assert float((model(x, 2).argmax(1) == y).float().mean()) > 0.65
