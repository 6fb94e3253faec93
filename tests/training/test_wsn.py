"""WSN: earlier tasks keep their bits, scores are drawn from the seed, and the best state comes from one step."""

import copy
from functools import partial

import pytest
import torch
from avalanche.training.plugins import LRSchedulerPlugin
from support.small_runs import OPTIMIZERS, assert_retained, make, split
from support.strategies import NormedConvNet, learn
from support.strategy_state import same_state, state, values

from avalanche_amnesia import MLP, WSN, ScoredWeights, SubnetModel
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.wsn import SubnetPlugin


def subnet(net=lambda: MLP(64, hidden=(40,), features=30), **options):
    torch.manual_seed(0)
    return SubnetModel(net(), **{"density": 0.3, **options})


wsn = partial(make, WSN, wrap=partial(SubnetModel, density=0.3), optimizer="adam")


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS)[::3])
def test_earlier_tasks_keep_their_bits_under_many_optimizers(optimizer):
    assert_retained(wsn(optimizer=optimizer, train_epochs=1), split(), 3)


@pytest.mark.parametrize(("optimizer", "options"), [("nesterov", {"bias": "masked"}), ("adam decay", {"density": 0.9})])
def test_earlier_tasks_keep_their_bits_with_an_optimizer_that_is_not_reset(optimizer, options):
    assert_retained(wsn(optimizer=optimizer, model=subnet(**options), reset_optimizer=False), split(), 3)


@pytest.mark.parametrize("norm", ["task", "batch"])
def test_earlier_tasks_keep_their_bits_in_a_conv_net_with_normalisation(norm):
    strategy = wsn(optimizer="adam decay", model=subnet(NormedConvNet, norm=norm), train_epochs=3)
    assert_retained(strategy, split(), 3)


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


@pytest.mark.parametrize(
    "options", [{"masks": ScoredWeights(scores="redraw")}, {"masks": ScoredWeights(keep="best", score_bits=2)}]
)
def test_evaluations_between_tasks_do_not_change_the_run(options):
    benchmark = split()
    one = learn(wsn(**options), benchmark.train_stream[:2])
    other = wsn(**options)
    for experience in benchmark.train_stream[:2]:
        torch.rand(3)
        other.train(experience, eval_streams=[benchmark.test_stream])
        other.eval(benchmark.test_stream)
    assert same_state(state(one.model), state(other.model))


def test_scores_follow_the_learning_rate_of_the_strategy_unless_they_have_their_own_optimizer():
    class Rates(SubnetPlugin):
        seen: list

        def after_update(self, strategy, **kwargs):
            super().after_update(strategy, **kwargs)
            self.seen.append(self.in_training.step_scores.optimizer.param_groups[0]["lr"])

    rates = {}
    for name, options in {
        "followed": {},
        "own": {"masks": ScoredWeights(score_optimizer=lambda p: torch.optim.SGD(p, lr=0.5))},
    }.items():
        strategy = wsn(optimizer=lambda p: torch.optim.SGD(p, lr=0.1), train_epochs=3, train_mb_size=64)
        schedule = torch.optim.lr_scheduler.ExponentialLR(strategy.optimizer, gamma=0.5)
        strategy.plugins.append(LRSchedulerPlugin(schedule))
        plugin = Rates(**({"masks": ScoredWeights(score_lr=0.1)} | options))
        plugin.seen = []
        strategy.plugins = [plugin if isinstance(p, SubnetPlugin) else p for p in strategy.plugins]
        strategy.train(split().train_stream[0])
        rates[name] = sorted(set(plugin.seen))
    assert rates == {"followed": pytest.approx([0.025, 0.05, 0.1]), "own": [0.5]}


# Best -------------------------------------------------------------------------------------------------------------


class Diary(SubnetPlugin):
    """Records, after every epoch, the score on held out data and the whole state."""

    def after_training_epoch(self, strategy, **kwargs):
        super().after_training_epoch(strategy, **kwargs)
        self.pages.append((self.in_training.holdout.score(strategy), copy.deepcopy(self._state(strategy.model))))
        self.sizes = (len(self.in_training.holdout.out), len(strategy.adapted_dataset), len(strategy.dataloader))

    def after_training_exp(self, strategy, **kwargs):
        batches = strategy.dataloader
        self.trained_on = torch.cat([batch[0] for batch in batches])
        self.held_out = strategy.experience.tensors[0][self.in_training.holdout.out]
        super().after_training_exp(strategy, **kwargs)


@pytest.mark.parametrize("net", [lambda: MLP(64, hidden=(40,), features=30), NormedConvNet], ids=["mlp", "conv"])
def test_best_weights_mask_head_and_norms_come_from_one_step(net):
    masks = ScoredWeights(keep="best", fit_head=False)
    strategy = wsn(optimizer="momentum", model=subnet(net, bias="masked"), masks=masks, train_epochs=6)
    strategy.optimizer.param_groups[0]["lr"] = 0.3  # wild enough for the best not to be the last
    diary = Diary(masks=masks, seed=3)
    strategy.plugins = [diary if isinstance(p, SubnetPlugin) else p for p in strategy.plugins]
    earlier_than_last = 0
    for experience in split(600).train_stream[:3]:
        before = values(strategy.model.backbone)
        diary.pages = []
        strategy.train(experience)
        scores = [score for score, _ in diary.pages]
        best = scores.index(max(scores))
        earlier_than_last += best < 5
        page, model, task = diary.pages[best][1], strategy.model, experience.task_label
        mask = model.choose(page["scores"]).bool()
        assert torch.equal(model.binary_mask(task), mask)
        for name, part in model.by_layer(mask).items():
            weight = model.backbone.get_parameter(name).detach().view(-1)
            assert torch.equal(weight[part], page[f"backbone.{name}"].view(-1)[part])
            outside = ~model.by_layer(model.cumulative_mask())[name]
            assert torch.equal(weight[outside], before[name].view(-1)[outside])
        for name, value in model.heads[task].state_dict().items():
            assert torch.equal(value, page[name]), name
    assert earlier_than_last


def test_held_out_data_is_never_trained_on():
    strategy = wsn(masks=ScoredWeights(keep="best"))
    diary = Diary(masks=ScoredWeights(keep="best"), seed=3)
    diary.pages = []
    strategy.plugins = [diary if isinstance(p, SubnetPlugin) else p for p in strategy.plugins]
    experience = split().train_stream[0]
    strategy.train(experience)
    n = len(experience.dataset)
    held = round(n / 10)
    assert diary.sizes == (held, n - held, -(-(n - held) // 16))
    rows = torch.cat([diary.trained_on, diary.held_out]).flatten(1)
    assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, experience.tensors[0].flatten(1).tolist()))


# Scores -----------------------------------------------------------------------------------------------------------


class Drawn(SubnetPlugin):
    """Records the initial scores of every task."""

    def before_training_exp(self, strategy, *args, **kwargs):
        super().before_training_exp(strategy, *args, **kwargs)
        notes.setdefault(self.seed, {})[self.in_training.task] = self.in_training.scores.detach().clone()


notes: dict[int, dict[int, torch.Tensor]] = {}


def drawn(tasks, *, seed=3, **options):
    """Task → initial scores of its training, by layer."""
    notes.clear()
    strategy = wsn(train_epochs=1, seed=seed)
    plugin = Drawn(seed=seed, **options)
    strategy.plugins = [plugin if isinstance(p, SubnetPlugin) else p for p in strategy.plugins]
    learn(strategy, [split().train_stream[task] for task in tasks])
    return {task: strategy.model.by_layer(scores) for task, scores in notes[seed].items()}


@pytest.mark.parametrize(("init", "low", "high"), [("fan_in", -0.125, 0.125), ("positive", 0, 1)])
def test_redrawn_scores_lie_in_their_range_and_depend_only_on_seed_and_task(init, low, high):
    options = {"masks": ScoredWeights(score_init=init, scores="redraw")}
    alone = drawn([1], **options)[1]["layers.0.weight"]
    torch.rand(7)
    later, other_seed = drawn([0, 1], **options), drawn([1], seed=4, **options)[1]
    assert low <= float(alone.min()) < low + 0.01
    assert high - 0.01 < float(alone.max()) <= high
    assert torch.equal(alone, later[1]["layers.0.weight"])
    assert not torch.equal(alone, later[0]["layers.0.weight"])
    assert not torch.equal(alone, other_seed["layers.0.weight"])


def test_nothing_of_a_task_stays_in_the_plugin():
    strategy = learn(wsn(masks=ScoredWeights(keep="best")), split().train_stream[:2])
    plugin = find_plugin(strategy, SubnetPlugin)
    assert not [name for name in vars(plugin) if name.startswith("_")]
    assert plugin.training is None
