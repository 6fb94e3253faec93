"""experiments/piggyback.py: a mask method in one file keeps the promises of the package."""

from pathlib import Path

import torch
from support.small_runs import OPTIMIZERS, StubbornSGD, logits_of, split
from support.strategies import Hears, learn
from support.strategy_state import same_state, state
from torch import nn

from avalanche_amnesia import MLP, UnlearningRequest, with_unlearning
from avalanche_amnesia.evaluation.capacity import network_capacity
from experiments.piggyback import Piggyback, PiggybackModel

ROOT = Path(__file__).parents[2]


def piggyback(optimizer=OPTIMIZERS["adam decay"], **options):
    torch.manual_seed(0)
    model = PiggybackModel(MLP(64, hidden=(64,), features=32))
    options = {"train_mb_size": 16, "train_epochs": 2, "seed": 3, "score_lr": 3e-3, **options}
    return Piggyback(model=model, optimizer=optimizer(model.parameters()), **options)


def test_piggyback_learns_only_by_masks():
    strategy, benchmark = piggyback(train_epochs=4), split(600)
    before = state(strategy.model.backbone)
    learn(strategy, benchmark.train_stream)
    for task, out in logits_of(strategy, benchmark, range(5)).items():
        assert (out.argmax(1) == benchmark.test_stream[task].tensors[1]).float().mean() > 0.85
        assert 0.1 < strategy.model.binary_mask(task).float().mean() < 0.9
    assert same_state(state(strategy.model.backbone), before)
    assert network_capacity(strategy) == 0  # no weights are left to train


def test_gradients_pass_through_the_threshold():
    model = PiggybackModel(MLP(6, hidden=(5,), features=4))
    model.add_head(0, 3)
    model.start_task(0, torch.randn(model.n_weights))
    x, y = torch.randn(9, 6), torch.arange(9) % 3
    nn.functional.cross_entropy(model(x, 0), y).backward()
    model.pass_gradients()
    scores = model.scores.detach().clone().requires_grad_()
    mask = (scores.detach() > model.threshold).float() + scores - scores.detach()
    weights = dict(model.backbone.named_parameters())
    masked = {name: weights[name] * part.view_as(weights[name]) for name, part in model.by_layer(mask).items()}
    nn.functional.cross_entropy(model.head(0)(torch.func.functional_call(model.backbone, masked, (x,))), y).backward()
    assert torch.allclose(model.scores.grad, scores.grad, rtol=1e-5, atol=1e-7)
    assert ((scores.grad != 0) & (scores < 0)).any()  # WSN's gradient has the other sign here
    assert all(parameter.grad is None for parameter in model.backbone.parameters())


def test_earlier_tasks_keep_their_bits():
    benchmark, kept, seen = split(), {}, []
    look = Hears(after_training_iteration=lambda s: seen.append(same_state(state(s.model.backbone), first)))
    strategy = piggyback(StubbornSGD, plugins=[look])
    first = state(strategy.model.backbone)
    for task, experience in enumerate(benchmark.train_stream[:3]):
        strategy.train(experience)
        now = logits_of(strategy, benchmark, range(task + 1))
        assert all(torch.equal(now[earlier], kept[earlier]) for earlier in kept)
        kept = now
    assert seen
    assert all(seen)


def test_unlearning_between_and_during_tasks_is_exact():
    request = UnlearningRequest((0,), at=2, when="iteration", iteration=4)
    strategy = learn(piggyback(), with_unlearning(split(), requests=[request]), 3)
    record = strategy.unlearn([1])
    assert record.claim == "conditional"  # the method is a script's own
    assert "experiments.piggyback.PiggybackPlugin" in record.rests_on
    assert record.plan.affected == ()
    strategy.train(split().train_stream[3])
    assert same_state(state(strategy.model), state(learn(piggyback(), split(), (2, 3)).model))


def test_the_documentation_shows_the_classes_of_the_file():
    page, script = (ROOT / "docs" / "extend.md").read_text(), (ROOT / "experiments" / "piggyback.py").read_text()
    shown = [part for part in script.split("\n\n\n") if part.startswith("class ")]
    assert len(shown) == 5
    assert all(part in page for part in shown)
