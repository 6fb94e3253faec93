"""Strategies in training whose tensors are shapes alone, on torch's ``meta`` device.

Whoever reads a number there gets an error, and so does whoever mixes devices: an accelerator would have to be waited
for in the first case, and refuses the second.
"""

import copy
from unittest import mock

import torch
from avalanche.core import SupervisedPlugin
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from avalanche_amnesia.models.multi_head import OneTask

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
