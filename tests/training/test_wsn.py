"""WSN: tasks keep their bits, scores come from the seed, and weights of an unlearned task are initial again."""

import json
from functools import partial

import pytest
import torch
from avalanche.training.plugins import LRSchedulerPlugin
from support import strategies
from support.small_runs import OPTIMIZERS, assert_retained, make, split
from support.strategies import DIGITS, Hears, NormedConvNet, learn, logits
from support.strategy_state import same_state, state, values

from avalanche_amnesia import MLP, WSN, ScoredWeights, SubnetModel
from avalanche_amnesia.benchmarks import UnlearningRequest, with_unlearning
from avalanche_amnesia.bits import same_bits
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


of_digits = partial(strategies.make, WSN, wrap=partial(SubnetModel, density=0.3))


def weights(model):
    return {name: model.backbone.get_parameter(name).detach().view(-1).clone() for name in model.graph.layers}


def test_weights_that_other_tasks_read_stay_and_are_recorded(tmp_path):
    strategy = learn(of_digits(), DIGITS.train_stream[:4])
    model, initial = strategy.model, weights(of_digits().model)
    masks, before = {t: model.masks[t] for t in range(4)}, weights(model)
    plan = strategy.plan_unlearning([1])
    record = strategy.unlearn([1])
    assert record.plan == plan
    assert record.claim == "approximate"
    after = weights(model)
    listed = record.plan.shared
    assert "backbone.layers.0.weight" in listed
    for name, value in after.items():
        moved_by_it = masks[1][name] & ~masks[0][name] & ~same_bits(before[name], initial[name])
        read = masks[2][name] | masks[3][name]
        assert torch.equal(value[read], before[name][read])
        alone = moved_by_it & ~read
        assert alone.any()
        assert bool(same_bits(value, initial[name])[alone].all())
        shared = moved_by_it & read
        assert plan.entries[f"backbone.{name}"] == int(alone.sum())
        if not shared.any():
            assert f"backbone.{name}" not in listed
            continue
        entry = listed[f"backbone.{name}"]
        assert entry.entries == int(shared.sum()) > 0
        assert entry.tasks == tuple(t for t in (2, 3) if (masks[t][name] & shared).any())
    record.save(tmp_path / "record.json")
    saved = json.loads((tmp_path / "record.json").read_text())["plan"]["shared"]
    assert saved == {name: {"entries": e.entries, "tasks": list(e.tasks)} for name, e in listed.items()}


# Claims -----------------------------------------------------------------------------------------------------------


def test_an_unlearning_leaves_the_scores_of_a_run_without_the_task():
    stream = with_unlearning(DIGITS, permanent=[1], deadline=1).train_stream

    def kept(tasks, gone=()):
        strategy = learn(of_digits(), stream, [0, 1])
        strategy.mark_permanent([0])
        learn(strategy, stream, tasks)
        claims = [strategy.unlearn([task]).claim for task in gone]
        names = strategy.model.state_dict()
        return claims, {int(name.split(".")[1]) for name in names if name.startswith("_learned.")}

    assert kept([2, 3, 4], [4]) == (["exact"], {1, 2, 3})  # 1 came of 0, to which no request leads back
    assert kept([2, 3]) == ([], {1, 2, 3})


def test_an_unlearning_in_the_middle_of_a_task_restores_scores_and_weights():
    def before(made):
        seen["before"] = made.model.scores.detach().clone()

    def after(made):
        now, before = made.model.scores.detach(), seen.pop("before")
        if not torch.equal(before, now):
            seen[made.clock.train_exp_iterations] = now.clone()

    seen = {}
    requests = [UnlearningRequest(tasks=(1,), at=2, when="iteration", iteration=3)]
    stream = with_unlearning(DIGITS, requests).train_stream
    strategy = of_digits()
    place = strategy.plugins.index(find_plugin(strategy, SubnetPlugin))
    strategy.plugins[place : place + 1] = [
        Hears(before_forward=before),
        strategy.plugins[place],
        Hears(before_forward=after),
    ]
    initial = weights(strategy.model)
    strategy.train(stream[0])
    scores, zero = strategy.model.last_scores(), logits(strategy, DIGITS.test_stream[0])
    learn(strategy, stream[1:3])
    assert list(seen) == [3]
    assert torch.equal(seen[3], scores)
    assert strategy.model.masked_tasks == (0, 2)
    assert torch.equal(logits(strategy, DIGITS.test_stream[0]), zero)
    free = strategy.model.by_layer(~strategy.model.cumulative_mask())
    for name, value in weights(strategy.model).items():
        assert bool(same_bits(value, initial[name])[free[name]].all())
    assert strategy.unlearn([0, 2]).claim == "exact"
    assert all(bool(same_bits(v, initial[name]).all()) for name, v in weights(strategy.model).items())
