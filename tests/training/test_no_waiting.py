"""No step reads a number back from the device, for which an accelerator would have to be waited for."""

import pytest
import torch
from avalanche.training import Naive
from support.isolated_pools import NETS
from support.meta_device import META, CopiesToMeta, step
from support.strategies import DIGITS, OPTIMIZERS, Hears, learn, quiet, with_plugins
from torch.optim import Adam

from avalanche_amnesia.contrib.shadows import BackupPlugin
from avalanche_amnesia.models import MaskedModel, MultiHeadModel, SubnetModel, UnknownTaskError
from avalanche_amnesia.models.multi_head import OneTask, single_task
from avalanche_amnesia.training import HAT, WSN, AdaHAT, AdaHATRule, AdjustmentRule, AmnesiacHAT, HardAttention
from avalanche_amnesia.training.hard_attention import SparsityRegulariser
from avalanche_amnesia.training.plugins import InMemoryLoaderPlugin

METHODS = {
    "HAT": (HAT, {}),
    "HAT, budget": (HAT, {"masks": HardAttention(budget="even")}),
    "HAT, gradients": (HAT, {"adjustment": AdjustmentRule(space="gradient")}),
    "pools": (HAT, {"isolation": "pools"}),
    "AdaHAT": (AdaHAT, {}),
    "AdaHAT, max": (AdaHAT, {"adjustment": AdaHATRule(between="max")}),
    "AmnesiacHAT": (AmnesiacHAT, {}),
    "AmnesiacHAT, shadows": (AmnesiacHAT, {"compensation": BackupPlugin}),
    "WSN": (WSN, {}),
    "stock": (Naive, {}),
}
ALL_OPTIMIZERS = {**OPTIMIZERS, "fused": lambda p: Adam(p, lr=1e-2, fused=True)}


def copies(method, net, optimizer, *plugins):
    """The strategy in its second task on the meta device: where its mask is soft, and where a budget's is fixed."""
    kind, options = METHODS[method]
    torch.manual_seed(0)
    backbone, early, late = NETS[net](), CopiesToMeta(1, 3), CopiesToMeta(1, 24)
    wrap = {WSN: SubnetModel, Naive: MultiHeadModel}.get(kind, MaskedModel)
    model = wrap(backbone) if wrap is MaskedModel else wrap(backbone, n_features=12 if net == "norms" else 16)
    if kind is Naive:
        options = {"criterion": torch.nn.CrossEntropyLoss(), "evaluator": quiet()}
        plugins = (InMemoryLoaderPlugin(), *plugins)
    strategy = kind(
        model=model,
        optimizer=ALL_OPTIMIZERS[optimizer](model.parameters()),
        plugins=[*plugins, early, late],
        train_mb_size=8,
        train_epochs=3,
        **with_plugins(options),
    )
    learn(strategy, DIGITS.train_stream[:2])
    return [early.copy, late.copy]


@pytest.mark.parametrize(("net", "optimizer"), [("mlp", "sgd"), ("norms", "momentum"), ("mlp", "fused")])
@pytest.mark.parametrize("method", METHODS)
def test_steps_run_where_no_number_can_be_read(method, net, optimizer):
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


def test_labels_of_one_task_are_known_without_a_look():
    assert single_task(OneTask(3, META).labels(5)) == 3
    labels = OneTask(3, torch.device("cpu")).labels(5)
    assert labels.tolist() == [3] * 5
    mixed = labels.clone()
    mixed[2] = 4
    assert (single_task(labels), single_task(labels[1:]), single_task(mixed)) == (3, 3, None)
    with pytest.raises(RuntimeError):
        single_task(OneTask(3, META).labels(5)[1:])


def test_labels_that_somebody_wrote_into_are_looked_at():
    labels = OneTask(3, torch.device("cpu")).labels(5)
    labels[2] = 4  # one number in memory: all of them
    assert single_task(labels) == 4
    with torch.inference_mode():
        labels = OneTask(3, torch.device("cpu")).labels(5)
        assert single_task(labels) == 3
        labels[0] = 4
        assert single_task(labels) == 4


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])  # by the gradients, and behind the step
def test_shares_of_sparsities_that_stay_on_the_device_are_those_of_numbers(monkeypatch, optimizer):
    def weights():
        torch.manual_seed(0)
        model = MaskedModel(NETS["mlp"]())
        strategy = AdaHAT(
            model=model,
            optimizer=OPTIMIZERS[optimizer](model.parameters()),
            train_mb_size=40,
            adjustment=AdaHATRule(alpha=1.0),
        )
        learn(strategy, DIGITS.train_stream[:3])
        return dict(model.named_parameters())

    numbers = weights()
    monkeypatch.setattr(SparsityRegulariser, "layer_sparsities", lambda self, gate: self.layer_sparsity(gate).unbind())
    for name, value in weights().items():
        torch.testing.assert_close(value, numbers[name], rtol=1e-4, atol=1e-6)


def test_an_unknown_task_is_named_where_its_label_is_known():
    model = MultiHeadModel(NETS["mlp"](), 16)
    with pytest.raises(UnknownTaskError, match="task 3"):
        model(torch.zeros(5, 64), OneTask(3, torch.device("cpu")).labels(5))
