"""No step reads a number back from the device, which would make it wait for an accelerator."""

import copy
from functools import partial
from unittest import mock

import pytest
import torch
from avalanche.core import SupervisedPlugin
from avalanche.training import Naive
from support.isolated_pools import NETS
from support.strategies import OPTIMIZERS, WRAPS, Hears, trained
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Adam, Optimizer

from avalanche_amnesia.contrib.shadows import BackupPlugin
from avalanche_amnesia.models.multi_head import OneTask, single_task
from avalanche_amnesia.training import HAT, WSN, AdaHAT, AdaHATRule, AdjustmentRule, AmnesiacHAT
from avalanche_amnesia.training.hat_formulas import SparsityRegulariser
from avalanche_amnesia.training.plugins.in_memory_loader import InMemoryLoaderPlugin

META = torch.device("meta")


class CopiesToMeta(SupervisedPlugin):
    """Copies a strategy in the middle of a training, without the values of its tensors.

    Args:
        task: in whose training.
        iteration: in front of which mini-batch.
    """

    def __init__(self, task, iteration):
        super().__init__()
        self.task, self.iteration, self.copy = task, iteration, None

    def before_training_iteration(self, strategy, **kwargs):
        if (strategy.experience.task_label, strategy.clock.train_exp_iterations) == (self.task, self.iteration):
            self.copy = _on_meta(strategy)
            self.copy.plugins = [plugin for plugin in self.copy.plugins if not isinstance(plugin, CopiesToMeta)]


def _on_meta(strategy):
    originals = {kind: kind.__deepcopy__ for kind in (nn.Parameter, Tensor)}

    def shape_alone(tensor, memo):
        if isinstance(tensor, FakeTensor):  # the traced graph's own
            return tensor
        original = originals[nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor]
        return _shape_of(tensor) if type(tensor) in originals else original(tensor, memo)

    def with_counts(optimizer, memo):
        for state in optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                memo[id(state["step"])] = state["step"].clone()  # lies on the host under every device
        copied = memo[id(optimizer)] = object.__new__(type(optimizer))
        copied.__setstate__(copy.deepcopy(optimizer.__getstate__(), memo))
        return copied

    with (
        mock.patch.object(Optimizer, "__deepcopy__", with_counts, create=True),
        mock.patch.object(Tensor, "__deepcopy__", shape_alone),
        mock.patch.object(nn.Parameter, "__deepcopy__", shape_alone),
    ):
        copied = copy.deepcopy(strategy)
    copied.device = META
    copied.dataloader.x, copied.dataloader.y = (_shape_of(t) for t in (strategy.dataloader.x, strategy.dataloader.y))
    copied.dataloader.task = OneTask(strategy.experience.task_label, META)
    return copied


def _shape_of(tensor):
    shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(shape, tensor.requires_grad)
    return shape.requires_grad_(tensor.requires_grad)


def step(strategy):
    """A mini-batch of the strategy's training loop."""
    loader, n = strategy.dataloader, strategy.dataloader.batch_size
    strategy.mbatch = [loader.x[:n], loader.y[:n], loader.task.labels(n)]
    strategy._unpack_minibatch()
    strategy._before_training_iteration()
    strategy.optimizer.zero_grad()
    strategy.loss = strategy._make_empty_loss()
    strategy._before_forward()
    strategy.mb_output = strategy.forward()
    strategy._after_forward()
    strategy.loss += strategy.criterion()
    strategy._before_backward()
    strategy.backward()
    strategy._after_backward()
    strategy._before_update()
    strategy.optimizer_step()
    strategy._after_update()
    strategy._after_training_iteration()


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
