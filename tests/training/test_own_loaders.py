"""A loader made by the user's strategy or plugin is used, even if the data are tensors in memory."""

import pytest
import torch
from avalanche.core import SupervisedPlugin
from avalanche.training import Naive
from support import tiny
from support.strategies import make
from torch.utils.data import DataLoader

from avalanche_amnesia.training import InMemoryLoaderPlugin
from avalanche_amnesia.training.plugins.in_memory_loader import TensorBatches


def first_samples(strategy):
    return DataLoader(strategy.adapted_dataset.subset([0, 1, 2, 3]), batch_size=2)


class OwnLoaders(Naive):
    def make_train_dataloader(self, **kwargs):
        self.dataloader = first_samples(self)

    make_eval_dataloader = make_train_dataloader


class OwnData(Naive):
    def train_dataset_adaptation(self, **kwargs):
        super().train_dataset_adaptation(**kwargs)
        data = self.adapted_dataset
        self.adapted_dataset = data.subset([0] * len(data))

    def eval_dataset_adaptation(self, **kwargs):
        super().eval_dataset_adaptation(**kwargs)
        data = self.adapted_dataset
        self.adapted_dataset = data.subset([0] * len(data))


class SetsLoader(SupervisedPlugin):
    def before_training_exp(self, strategy, **kwargs):
        strategy.dataloader = first_samples(strategy)

    before_eval_exp = before_training_exp


class SetsData(SupervisedPlugin):
    def after_train_dataset_adaptation(self, strategy, **kwargs):
        strategy.adapted_dataset = strategy.adapted_dataset.subset([0] * len(strategy.adapted_dataset))

    after_eval_dataset_adaptation = after_train_dataset_adaptation


class SetsTransform(SupervisedPlugin):
    def after_train_dataset_adaptation(self, strategy, **kwargs):
        data = strategy.adapted_dataset
        strategy.adapted_dataset = data.replace_current_transform_group((torch.zeros_like, None))

    after_eval_dataset_adaptation = after_train_dataset_adaptation


class Notes(SupervisedPlugin):
    """Notes the kind of each loader, and how many different samples it gives."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def before_training_epoch(self, strategy, **kwargs):
        x = torch.cat([batch[0] for batch in strategy.dataloader])
        self.seen.append((type(strategy.dataloader) is TensorBatches, len(x.unique(dim=0))))

    before_eval_forward = before_training_epoch


CASES = {
    "methods of the strategy": (OwnLoaders, [], 4),
    "data of the strategy": (OwnData, [], 1),
    "loader of a plugin": (Naive, [SetsLoader()], 4),
    "data of a plugin": (Naive, [SetsData()], 1),
    "transform of a later plugin": (Naive, [SetsTransform()], None),  # Avalanche itself drops it in training
}


@pytest.mark.parametrize("case", [*CASES, "Avalanche's own"])
def test_only_avalanche_s_own_loader_is_replaced(case):
    kind, plugins, samples = CASES.get(case, (Naive, [], None))
    notes, ours = Notes(), InMemoryLoaderPlugin()
    ordered = [ours, *plugins] if "later" in case else [*plugins, ours]
    sizes = {"train_mb_size": 8, "train_epochs": 1, "eval_mb_size": 1000}
    strategy = make(kind, net=tiny.Net, optimizer="sgd", evaluator=None, plugins=[*ordered, notes], **sizes)
    experience = tiny.tasks().train_stream[0]
    strategy.train(experience)
    strategy.eval([experience])
    assert {replaced for replaced, _ in notes.seen} == {case not in CASES}
    if samples is not None:
        assert {n for _, n in notes.seen} == {samples}
