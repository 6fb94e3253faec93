"""A loader made by the user's strategy or plugin is used, even if the data are tensors in memory."""

import pytest
import torch
from avalanche.training import Naive
from support import tiny
from support.strategies import Hears, make
from torch.utils.data import DataLoader

from avalanche_amnesia.training import InMemoryLoaderPlugin
from avalanche_amnesia.training.plugins.in_memory_loader import TensorBatches


def first_samples(strategy):
    return DataLoader(strategy.adapted_dataset.subset([0, 1, 2, 3]), batch_size=2)


class OwnLoaders(Naive):
    def make_train_dataloader(self, **kwargs):
        self.dataloader = first_samples(self)

    make_eval_dataloader = make_train_dataloader


def sets_loader(strategy):
    strategy.dataloader = first_samples(strategy)


def sets_data(strategy):
    strategy.adapted_dataset = strategy.adapted_dataset.subset([0] * len(strategy.adapted_dataset))


def sets_transform(strategy):
    strategy.adapted_dataset = strategy.adapted_dataset.replace_current_transform_group((torch.zeros_like, None))


class OwnData(Naive):
    def train_dataset_adaptation(self, **kwargs):
        super().train_dataset_adaptation(**kwargs)
        sets_data(self)

    def eval_dataset_adaptation(self, **kwargs):
        super().eval_dataset_adaptation(**kwargs)
        sets_data(self)


def adapting(function):
    """Call a function after the data were adapted, in training and in evaluation."""
    return Hears(after_train_dataset_adaptation=function, after_eval_dataset_adaptation=function)


CASES = {
    "methods of the strategy": (OwnLoaders, [], 4),
    "data of the strategy": (OwnData, [], 1),
    "loader of a plugin": (Naive, [Hears(before_training_exp=sets_loader, before_eval_exp=sets_loader)], 4),
    "data of a plugin": (Naive, [adapting(sets_data)], 1),
    # Avalanche itself drops it in training.
    "transform of a later plugin": (Naive, [adapting(sets_transform)], None),
}


@pytest.mark.parametrize("case", [*CASES, "Avalanche's own"])
def test_only_avalanche_s_own_loader_is_replaced(case):
    kind, plugins, samples = CASES.get(case, (Naive, [], None))
    seen, ours = [], InMemoryLoaderPlugin()

    def note(strategy):
        """Note the kind of the loader, and how many different samples it gives."""
        x = torch.cat([batch[0] for batch in strategy.dataloader])
        seen.append((type(strategy.dataloader) is TensorBatches, len(x.unique(dim=0))))

    notes = Hears(before_training_epoch=note, before_eval_forward=note)
    ordered = [ours, *plugins] if "later" in case else [*plugins, ours]
    sizes = {"train_mb_size": 8, "train_epochs": 1, "eval_mb_size": 1000}
    strategy = make(kind, net=tiny.Net, optimizer="sgd", evaluator=None, plugins=[*ordered, notes], **sizes)
    experience = tiny.tasks().train_stream[0]
    strategy.train(experience)
    strategy.eval([experience])
    assert {replaced for replaced, _ in seen} == {case not in CASES}
    if samples is not None:
        assert {n for _, n in seen} == {samples}
