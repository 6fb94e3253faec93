"""Strategies in training whose tensors are shapes alone, on torch's ``meta`` device.

Whoever reads a number there gets an error, and so does whoever mixes devices: an accelerator would have to be waited
for in the first case, and refuses the second.
"""

import copy
import gc

import torch
from avalanche.core import SupervisedPlugin
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from avalanche_amnesia.models.task_labels import OneTask

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
    everything, memo = gc.get_objects(), {}
    optimizers = [thing for thing in everything if isinstance(thing, Optimizer)]
    # Counts of steps lie on the host under every device.
    counts = {id(state.get("step")) for optimizer in optimizers for state in optimizer.state.values()}
    for thing in everything:
        if type(thing) in (Tensor, nn.Parameter) and id(thing) not in counts:
            memo[id(thing)] = _shape_of(thing)
        elif isinstance(thing, FakeTensor):  # the traced graph's own
            memo[id(thing)] = thing
    copied = copy.deepcopy(strategy, memo)
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
