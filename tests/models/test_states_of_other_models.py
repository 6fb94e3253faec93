"""The state of another model is refused and changes nothing; a seed may be any whole number."""

from functools import partial

import pytest
import torch
from support import tiny
from support.strategies import trained
from support.strategy_state import bits, unchanged
from torch import nn


class Wider(tiny.Net):
    features = 7

    def __init__(self):
        super().__init__()
        self.second = nn.Linear(8, 7)


of_one_task = partial(trained, 1, tiny.tasks(), tiny.strategy)


CHANGES = {
    "other heads": (
        lambda state: state | {"heads.0.weight": torch.zeros(2, 9)},
        r"heads.0.weight is \(2, 9\), here \(2, 6\)",
    ),
    "flat head": (lambda state: state | {"heads.0.weight": torch.zeros(2)}, r"heads.0.weight is \(2,\), here \(2, 6\)"),
    "no such task": (lambda state: state | {"heads.x.weight": torch.zeros(2, 6)}, "heads.x.weight|no share of task x"),
    "more": (lambda state: state | {"more": torch.zeros(2)}, r"it has besides \['more'\]"),
    "less": (lambda state: {n: v for n, v in state.items() if "first" not in n}, "it lacks .*first.weight|no share of"),
}


@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize("name", ["other network", *CHANGES])
def test_the_state_of_another_model_is_refused_and_changes_nothing(name, kind):
    strategy = of_one_task(kind=kind)
    if name == "other network":
        state, message = (
            of_one_task(kind=kind, net=Wider).model.state_dict(),
            r"second.weight is \(7, 8\), here \(6, 8\)|no share of this b",
        )
    else:
        change, message = CHANGES[name]
        state = change(dict(of_one_task(kind=kind, train_epochs=2).model.state_dict()))  # other values
    with unchanged(lambda: bits(strategy.model)), pytest.raises(ValueError, match=message):
        strategy.model.load_state_dict(state)
    assert strategy.model.tasks == (0,)
    strategy.train(tiny.tasks().train_stream[1])
    strategy.unlearn([0])
    assert strategy.model.tasks == (1,)


@pytest.mark.parametrize("given", [None, [], "model.pt", {"heads.0.weight": 3}], ids=repr)
def test_an_object_that_is_no_state_is_refused(given):
    model = tiny.strategy().model
    with pytest.raises(
        TypeError, match=r"takes a mapping of tensors.*torch.load\(path\).*load_state\(strategy, path\)"
    ):
        model.load_state_dict(given)


@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_may_be_any_whole_number(kind, seed):
    strategy, other = of_one_task(kind=kind, seed=seed), of_one_task(kind=kind, seed=seed + 2**65)
    assert bits(strategy.model) != bits(other.model)
    strategy.unlearn([0])
