"""WSN unlearns: weights of one task are initial again, weights of other tasks stay and are recorded."""

import json
from functools import partial

import torch
from support.strategies import DIGITS, Hears, learn, logits, make

from avalanche_amnesia.benchmarks import UnlearningRequest, with_unlearning
from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.models import SubnetModel
from avalanche_amnesia.training import WSN
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.training.plugins.wsn import SubnetPlugin


def wsn(*, bias="off", density=0.3, economies=None, **options):
    if economies is not None:
        options["trajectory"] = TrajectoryPlugin(**economies)
    return make(WSN, wrap=partial(SubnetModel, density=density, bias=bias), **options)


def weights(model):
    return {name: model.backbone.get_parameter(name).detach().view(-1).clone() for name in model.graph.layers}


def test_weights_that_other_tasks_read_stay_and_are_recorded(tmp_path):
    strategy = learn(wsn(), DIGITS.train_stream[:4])
    model, initial = strategy.model, weights(wsn().model)
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


def test_scores_are_kept_for_unlearnable_tasks_alone():
    strategy = wsn()
    for experience in DIGITS.train_stream[:4]:
        strategy.train(experience)
        if experience.task_label in (1, 2):
            strategy.mark_permanent([experience.task_label])
    kept = {int(n.split(".")[1]) for n in strategy.model.state_dict() if n.startswith("_learned.")}
    assert kept == {2, 3}  # 3's own, and 2's to go back to; nothing lies before 0 but the seed
    assert strategy.unlearn([3]).claim == "exact"


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
    strategy = wsn()
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
