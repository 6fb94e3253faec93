"""No step reads a number back from the device, which would make it wait for an accelerator."""

from functools import partial

import pytest
import torch
from avalanche.training import Naive
from support.isolated_pools import NETS
from support.meta_device import META, CopiesToMeta, step
from support.strategies import OPTIMIZERS, WRAPS, Hears, trained
from torch.optim import Adam

from avalanche_amnesia.contrib.shadows import BackupPlugin
from avalanche_amnesia.models.multi_head import OneTask, single_task
from avalanche_amnesia.training import HAT, WSN, AdaHAT, AdaHATRule, AdjustmentRule, AmnesiacHAT
from avalanche_amnesia.training.hat_formulas import SparsityRegulariser
from avalanche_amnesia.training.plugins.in_memory_loader import InMemoryLoaderPlugin

METHODS = {
    "HAT": (HAT, {}),
    "HAT, gradients": (HAT, {"adjustment": AdjustmentRule(space="gradient")}),
    "AdaHAT": (AdaHAT, {}),
    "AmnesiacHAT": (AmnesiacHAT, {}),
    "AmnesiacHAT, shadows": (AmnesiacHAT, {"compensation": BackupPlugin}),
    "WSN": (WSN, {}),
    "stock": (Naive, {}),
}
ALL_OPTIMIZERS = {**OPTIMIZERS, "fused": lambda p: Adam(p, lr=1e-2, fused=True)}


def copies(method, net, optimizer, *plugins):
    """The strategy in its second task on the meta device: where its mask is soft, and where a budget's is fixed."""
    kind, options = METHODS[method]
    early, late = CopiesToMeta(1, 3), CopiesToMeta(1, 24)
    if kind in WRAPS:
        options = {"wrap": partial(WRAPS[kind], n_features=12 if net == "norms" else 16)}
    plugins = [*([InMemoryLoaderPlugin()] if kind is Naive else ()), *plugins, early, late]
    options = {"net": NETS[net], "optimizer": ALL_OPTIMIZERS[optimizer], "plugins": plugins, **options}
    trained(2, kind=kind, train_mb_size=8, train_epochs=3, **options)
    return [early.copy, late.copy]


@pytest.mark.parametrize(
    ("method", "net", "optimizer"),
    [*((method, "norms", "momentum") for method in METHODS), ("HAT", "mlp", "fused"), ("AmnesiacHAT", "mlp", "sgd")],
)
def test_steps_run_on_a_device_whose_numbers_cant_be_read(method, net, optimizer):
    for strategy in copies(method, net, optimizer):
        for _ in range(2):  # before the 25th faint numbers are cleared
            step(strategy)
            strategy.clock.train_exp_iterations += 1
        assert strategy.loss.device == META
        assert all(parameter.device == META for parameter in strategy.model.parameters())


def test_a_plugin_that_reads_the_loss_is_caught():
    strategy = copies("HAT", "mlp", "sgd", Hears(before_backward=lambda made: float(made.loss)))[0]
    with pytest.raises(RuntimeError, match="meta tensors"):
        step(strategy)


def test_the_label_of_a_mini_batch_of_one_task_is_known_without_reading_it():
    assert single_task(OneTask(3, META).labels(5)) == 3
    labels = OneTask(3, torch.device("cpu")).labels(5)
    assert labels.tolist() == [3] * 5
    mixed = labels.clone()
    mixed[2] = 4
    assert (single_task(labels), single_task(labels[1:]), single_task(mixed)) == (3, 3, None)
    with pytest.raises(RuntimeError):
        single_task(OneTask(3, META).labels(5)[1:])


def test_labels_that_were_changed_are_read():
    labels = OneTask(3, torch.device("cpu")).labels(5)
    labels[2] = 4  # one number in memory: all of them
    assert single_task(labels) == 4
    with torch.inference_mode():
        labels = OneTask(3, torch.device("cpu")).labels(5)
        assert single_task(labels) == 3
        labels[0] = 4
        assert single_task(labels) == 4


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])  # by the gradients, and after the step
def test_rates_computed_on_the_device_equal_those_of_numbers(monkeypatch, optimizer):
    def weights():
        options = {"optimizer": optimizer, "adjustment": AdaHATRule(alpha=1.0), "train_epochs": 1}
        return dict(trained(3, kind=AdaHAT, **options).model.named_parameters())

    numbers = weights()
    monkeypatch.setattr(SparsityRegulariser, "layer_sparsities", lambda self, gate: self.layer_sparsity(gate).unbind())
    for name, value in weights().items():
        torch.testing.assert_close(value, numbers[name], rtol=1e-4, atol=1e-6)
