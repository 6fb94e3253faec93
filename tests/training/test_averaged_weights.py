"""A task ends with the mean of its last weights."""

from functools import partial

import pytest
import torch
from support.fault_injection import FailsAtEvent, InjectedError
from support.small_runs import make, split
from support.strategies import BatchNormedConvNet, Hears, learn
from support.strategy_state import same_state, state
from torch.utils.data import DataLoader

from avalanche_amnesia import HAT, WSN, AmnesiacHAT, DisjointModel, DisjointSubnets
from avalanche_amnesia.benchmarks import UnlearningRequest, with_unlearning
from avalanche_amnesia.benchmarks.data import TaskError
from avalanche_amnesia.contrib.baselines import Independent
from avalanche_amnesia.isolation import Pools
from avalanche_amnesia.training import AveragedWeights, RandomFeatures, UnlearningPlugin
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.norm_statistics import recompute

STREAM = split(1000)
STEPS = 2 * 13  # two epochs of 200 samples in mini-batches of 16


def averaging(kind=DisjointSubnets, last=0.3, plugins=(), **options):
    if kind is DisjointSubnets:
        options = {"isolation": Pools(5), "optimizer": "adam", "fit_head": False, **options}
    return make(kind, plugins=[AveragedWeights(last), *plugins], **options)


def weights_of(strategy):
    learning = {id(p) for group in strategy.optimizer.param_groups for p in group["params"]}
    named = strategy.model.named_parameters()
    return {name: p.detach().double().clone() for name, p in named if p.requires_grad and id(p) in learning}


@pytest.mark.parametrize("last", [1e-12, 0.02, 0.3, 1])
@pytest.mark.parametrize("kind", [DisjointSubnets, Independent, WSN])
def test_the_weights_are_the_mean_after_each_of_the_last_steps(kind, last):
    after, ended = [], {}
    ears = Hears(
        after_training_iteration=lambda s: after.append(weights_of(s)),
        after_training_epoch=lambda s: ended.update(weights_of(s)),
    )
    learn(averaging(kind, last, [ears]), STREAM, 1)
    assert len(after) == STEPS
    averaged = after[min(int((1 - last) * STEPS + 1e-9), STEPS - 1) :]
    assert len(averaged) == {1e-12: 1, 0.02: 1, 0.3: 8, 1: 26}[last]
    for name, found in ended.items():
        assert torch.allclose(found, torch.stack([weights[name] for weights in averaged]).mean(0), atol=1e-6)
    assert any(not torch.equal(ended[name], after[-1][name]) for name in ended) is (last > 0.02)


def test_frozen_weights_keep_their_bits():
    strategy = averaging(HAT)
    x = STREAM.test_stream[0].dataset[0][0][None]
    strategy.train(STREAM.train_stream[0])
    before = strategy.model.eval()(x, 0)
    strategy.train(STREAM.train_stream[1])
    assert torch.equal(strategy.model.eval()(x, 0), before)


def test_weights_that_do_not_move_keep_the_sign_of_a_zero():
    strategy = averaging(Independent)
    for parameter in strategy.model.backbone.parameters():
        parameter.data.zero_().neg_()
    learn(strategy, STREAM, 1)
    assert all(bool(parameter.signbit().all()) for parameter in strategy.model.backbone.parameters())


def test_a_stopped_training_has_no_mean_and_no_regression_and_warns():
    stops = Hears(after_training_epoch=lambda s: s.stop_training())
    strategy = averaging(plugins=[RandomFeatures(50), stops], net=BatchNormedConvNet)
    with pytest.warns(UserWarning, match=r"did nothing for task 0, as its training stopped after 1 of 2 ep") as told:
        learn(strategy, STREAM, 1)
    assert [str(each.message).split()[0] for each in told] == ["AveragedWeights", "RandomFeatures"]
    assert find_plugin(strategy, AveragedWeights)._statistics is None
    assert not any("ridge" in name for name in strategy.model.state_dict())


def test_an_interrupted_pass_leaves_a_norm_as_it_was():
    def fails(x):
        raise InjectedError(norm(x))

    norm = torch.nn.BatchNorm1d(3)
    with pytest.raises(InjectedError):
        recompute([norm], [torch.rand(4, 3)], fails)
    assert (norm.momentum, len(norm._forward_pre_hooks)) == (0.1, 0)


@pytest.mark.parametrize("kind", [DisjointSubnets, Independent])
def test_norms_have_the_statistics_of_the_mean_weights(kind):
    batches, seen = [], []
    ears = Hears(before_backward=lambda s: batches.append(s.mb_x))
    model = learn(averaging(kind, plugins=[ears], net=BatchNormedConvNet), STREAM, 1).model
    norm = model.network(0).norm
    hook = norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        for x in batches[-16:]:
            model.eval()(x, 0)
    hook.remove()
    assert torch.allclose(norm.running_mean, torch.stack([x.mean((0, 2, 3)) for x in seen]).mean(0), atol=1e-5)
    assert norm.momentum == 0.1


def factory(requests=(), kind=DisjointSubnets, **options):
    stream = with_unlearning(STREAM, requests) if requests else STREAM
    options |= {"fit_head": True} if kind is DisjointSubnets else {}
    return stream, partial(averaging, kind, net=BatchNormedConvNet, train_epochs=3, **options)


@pytest.mark.parametrize("kind", [DisjointSubnets, Independent])
def test_an_unlearning_stays_exact_and_is_proved_beside_a_regression_too(kind):
    stream, make_strategy = factory(kind=kind, plugins=[RandomFeatures(50)])
    strategy = learn(make_strategy(), stream, 3)
    for request in ({"tasks": [1]}, {"task": 2, "samples": [3, 5], "data": stream.train_stream[2]}):
        record = strategy.unlearn(**request)
        assert record.claim == "exact", record.reasons
        assert strategy.prove(make_strategy, stream).proof


def test_a_request_in_the_middle_of_the_mean_stays_exact():
    request = UnlearningRequest((0,), 1, "iteration", 34)  # of 39; the mean begins at 27
    stream, make_strategy = factory([request])
    strategy = learn(make_strategy(), stream, 2)
    assert same_state(state(strategy.model), state(learn(make_strategy(), STREAM, [1]).model))


def test_a_mean_of_shared_weights_begins_again_after_a_request():
    request = UnlearningRequest((0,), 1, "iteration", 34)
    heard = []
    ears = Hears(after_unlearning=lambda s: heard.append(find_plugin(s, AveragedWeights)._averaged))
    strategy = averaging(AmnesiacHAT, plugins=[ears], train_epochs=3)
    learn(strategy, with_unlearning(STREAM, [request]), 2)
    (record,) = find_plugin(strategy, UnlearningPlugin).records
    assert any("began again" in line for line in record.purged)
    assert heard == [0]


@pytest.mark.parametrize("event", ["after_training_iteration", "after_training_epoch", "after_training_exp"])
def test_an_interrupted_task_leaves_no_mean(event):
    whole = learn(averaging(), STREAM, 2)
    strategy = averaging(plugins=[(failing := FailsAtEvent(event, times=24 if "iteration" in event else 0))])
    with pytest.raises(InjectedError):
        strategy.train(STREAM.train_stream[0])
    strategy.abort_training()
    assert strategy.mbatch is strategy.mb_output is None
    failing.event = ""
    learn(strategy, STREAM, 2)
    assert same_state(state(strategy.model), state(whole.model))


def test_a_loader_without_a_length_is_refused():
    class Own(DisjointSubnets):
        def make_train_dataloader(self, **kwargs):
            self.dataloader = (batch for batch in DataLoader(self.adapted_dataset, batch_size=16))

    with pytest.raises(TaskError, match=r"AveragedWeights\(last=0.3\) needs .* generator has no __len__"):
        learn(averaging(Own, wrap=DisjointModel), STREAM, 1)
