"""Importance of units, measured at the end of a task: measures, use by AdaHAT, saving and unlearning."""

import pytest
import torch
from support.strategies import make
from support.strategy_state import bits
from torch.nn.functional import cross_entropy

from avalanche_amnesia import AdaHATRule, SplitDigits
from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.training import TaskStrategy
from avalanche_amnesia.training.host.saving import load_state
from experiments.importance import input_gradient, output_contribution

MEASURES = [input_gradient, output_contribution]
STREAM = SplitDigits(n_train=200).train_stream
SAMPLES = task_data(STREAM[0])


def strategy(importance, **options) -> TaskStrategy:
    rule = AdaHATRule(importance=importance)
    return make(hidden=(24, 20), features=12, adjustment=rule, train_mb_size=20, train_epochs=3, seed=1, **options)


@pytest.fixture(scope="module")
def trained():
    made = {measure: strategy(measure) for measure in MEASURES}
    for each in made.values():
        each.train(STREAM[:2])
    return {measure: each.model for measure, each in made.items()}


def test_the_input_gradient_equals_autograds_gradient_of_the_loss(trained):
    model, (x, y) = trained[input_gradient].eval(), SAMPLES
    found = model.by_layer(input_gradient(model, 0, x[:64], y[:64]))
    names = [name for name in model.graph.factors if name.endswith("weight")]
    weights = [model.backbone.get_parameter(name) for name in names]
    grads = torch.autograd.grad(cross_entropy(model(x[:64], 0), y[:64]), weights)
    assert len(grads) == len(found)
    for grad, of_layer in zip(grads, found.values(), strict=True):
        assert torch.allclose(grad.abs().sum(1), of_layer, atol=1e-6)


def test_the_output_contribution_equals_the_loss_of_a_closed_feature(trained):
    model, (x, y) = trained[output_contribution].eval(), SAMPLES
    found = output_contribution(model, 0, x.repeat(200, 1, 1, 1), y.repeat(200))
    assert bool((found[~model.binary_mask(0)] == 0).all())
    last = list(model.by_layer(found).values())[-1]
    expected = 200 * model.features(x, 0).square().sum(0)  # a feature contributes itself
    assert torch.allclose(last.square(), expected, rtol=0.15)


def test_importance_is_saved_and_removed_with_its_task(tmp_path):
    made = strategy(input_gradient)
    made.train(STREAM[:2])
    made.save(tmp_path / "state")
    other = strategy(input_gradient)
    load_state(other, tmp_path / "state")
    assert torch.equal(other.model.importance(1), made.model.importance(1))
    for each in (made, other):
        each.train(STREAM[2])
    assert bits(made.model) == bits(other.model)
    made.unlearn([1])
    assert not any(".1" in name for name in made.model.state_dict() if name.startswith("_importances"))
    assert "_importances.2" in made.model.state_dict()


def test_wrong_measures_are_refused_and_the_training_is_undone():
    wrong = (lambda *_: torch.ones(3), lambda model, *_: -torch.ones(model.n_units), lambda model, *_: float("nan"))
    for importance in wrong:
        made = strategy(importance)
        before = bits(made.model)
        with pytest.raises(ValueError, match="must return a finite number of at least 0 for each of the 56"):
            made.train(STREAM[0])
        made.abort_training()
        assert bits(made.model) == before
    with pytest.raises(ValueError, match="importance must be one of"):
        AdaHATRule(importance="max")
