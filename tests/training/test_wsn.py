"""WSN: earlier tasks keep their bits, scores are drawn from the seed, and the best state comes from one step."""

from functools import partial

import pytest
import torch
from avalanche.training.plugins import LRSchedulerPlugin
from support.small_runs import OPTIMIZERS, assert_retained, make, split
from support.strategies import Hears, NormedConvNet, learn
from support.strategy_state import same_state, state, values

from avalanche_amnesia import MLP, WSN, ScoredWeights, SubnetModel
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.wsn import SubnetPlugin


def subnet(net=lambda: MLP(64, hidden=(40,), features=30), **options):
    torch.manual_seed(0)
    return SubnetModel(net(), **{"density": 0.3, **options})


wsn = partial(make, WSN, wrap=partial(SubnetModel, density=0.3), optimizer="adam")


KEPT = [
    *({"optimizer": optimizer, "train_epochs": 1} for optimizer in list(OPTIMIZERS)[::3]),
    {"optimizer": "nesterov", "of_model": {"bias": "masked"}, "reset_optimizer": False},
    {"optimizer": "adam decay", "of_model": {"density": 0.9}, "reset_optimizer": False},
    *({"of_model": {"net": NormedConvNet, "norm": norm}, "train_epochs": 3} for norm in ("task", "batch")),
]


@pytest.mark.parametrize("options", KEPT, ids=str)
def test_earlier_tasks_keep_their_bits_under_many_settings(options):
    options = {"optimizer": "adam decay", **options}
    assert_retained(wsn(model=subnet(**options.pop("of_model", {})), **options), split(), 3)


def test_each_weight_moves_only_in_the_first_task_whose_mask_holds_it():
    strategy, benchmark = wsn(optimizer="adam decay"), split()
    model = strategy.model
    initial = values(model.backbone)
    previous, used = initial, {name: torch.zeros(p.numel(), dtype=torch.bool) for name, p in initial.items()}
    for experience in benchmark.train_stream:
        strategy.train(experience)
        masks = model.masks[experience.task_label]
        now = values(model.backbone)
        for name, value in now.items():
            moved = (value != previous[name]).view(-1)
            assert moved.any()
            assert not moved[used[name]].any(), "a weight of an earlier task moved"
            assert not moved[~masks[name]].any(), "a weight outside the mask moved"
            used[name] |= masks[name]
            assert torch.equal(value.view(-1)[~used[name]], initial[name].view(-1)[~used[name]])
        previous = now
        assert all(int(m.sum()) == model.graph.layers[n].kept for n, m in masks.items())


@pytest.mark.parametrize("options", [{"masks": ScoredWeights(scores="redraw")}, {"masks": ScoredWeights(score_bits=2)}])
def test_evaluations_between_tasks_do_not_change_the_run(options):
    benchmark = split()
    one = learn(wsn(**options), benchmark.train_stream[:2])
    other = wsn(**options)
    for experience in benchmark.train_stream[:2]:
        torch.rand(3)
        other.train(experience, eval_streams=[benchmark.test_stream])
        other.eval(benchmark.test_stream)
    assert same_state(state(one.model), state(other.model))


def test_scores_follow_the_learning_rate_of_the_strategy():
    def look(made):
        seen.add(find_plugin(made, SubnetPlugin).in_training.step_scores.optimizer.param_groups[0]["lr"])

    seen, options = set(), {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "train_mb_size": 64}
    strategy = wsn(masks=ScoredWeights(score_lr=0.1), train_epochs=3, **options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(strategy.optimizer, gamma=0.5)
    strategy.plugins += [LRSchedulerPlugin(schedule), Hears(after_training_iteration=look)]
    strategy.train(split().train_stream[0])
    assert sorted(seen) == pytest.approx([0.025, 0.05, 0.1])


# Scores -----------------------------------------------------------------------------------------------------------


def drawn(tasks, *, seed=3, **options):
    """Task → initial scores of its training, by layer."""

    def look(made):
        now = find_plugin(made, SubnetPlugin).in_training
        notes[now.task] = made.model.by_layer(now.scores.detach().clone())

    notes = {}
    learn(wsn(train_epochs=1, seed=seed, plugins=[Hears(before_training_epoch=look)], **options), split(), tasks)
    return notes


def test_redrawn_scores_lie_in_their_range_and_depend_only_on_seed_and_task():
    options, low, high = {"masks": ScoredWeights(scores="redraw")}, -0.125, 0.125
    alone = drawn([1], **options)[1]["layers.0.weight"]
    torch.rand(7)
    later, other_seed = drawn([0, 1], **options), drawn([1], seed=4, **options)[1]
    assert low <= float(alone.min()) < low + 0.01
    assert high - 0.01 < float(alone.max()) <= high
    assert torch.equal(alone, later[1]["layers.0.weight"])
    assert not torch.equal(alone, later[0]["layers.0.weight"])
    assert not torch.equal(alone, other_seed["layers.0.weight"])


def test_nothing_of_a_task_stays_in_the_plugin():
    strategy = learn(wsn(), split().train_stream[:2])
    plugin = find_plugin(strategy, SubnetPlugin)
    assert not [name for name in vars(plugin) if name.startswith("_")]
    assert plugin.training is None
