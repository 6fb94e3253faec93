"""Signatures of strategies, named rules, and the few modules that HAT imports."""

import ast
import inspect
from pathlib import Path

import pytest
import torch
from support.small_runs import make, permuted
from support.strategy_state import values

from avalanche_amnesia.contrib.baselines import PALL, CLPUDERpp, Independent
from avalanche_amnesia.training import HAT, WSN, AdaHAT, AdjustmentRule, AmnesiacHAT, DisjointSubnets, TaskStrategy
from avalanche_amnesia.training.update_rules import RULES

ROOT = Path(__file__).parents[2]
STRATEGIES = [HAT, AdaHAT, AmnesiacHAT, WSN, DisjointSubnets, PALL, CLPUDERpp, Independent]
OF_AVALANCHE = ["criterion", "train_mb_size", "train_epochs", "eval_mb_size", "device", "plugins", "evaluator"]
OF_AVALANCHE += ["eval_every", "peval_mode"]
MODULES_OF_HAT = 43
"""The package's modules that HAT reaches by imports at their top, but for packages' faces."""


class WithOneMore(AmnesiacHAT):
    """As a user writes it."""

    def __init__(self, *, mine=0, **options):
        super().__init__(**options)
        self.mine = mine


@pytest.mark.parametrize("kind", STRATEGIES)
def test_the_signature_names_each_of_at_most_twenty_arguments(kind):
    parameters = inspect.signature(kind).parameters
    assert len(parameters) <= 20
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters.values())
    assert list(parameters)[:2] == ["model", "optimizer"]
    of_base = inspect.signature(TaskStrategy).parameters
    assert [(name, parameters[name].default) for name in OF_AVALANCHE] == [
        (name, of_base[name].default) for name in OF_AVALANCHE
    ]


def test_a_subclass_takes_what_its_base_takes():
    assert set(inspect.signature(WithOneMore).parameters) == {"mine", *inspect.signature(AmnesiacHAT).parameters}
    assert make(WithOneMore, mine=3).mine == 3


def test_a_rule_has_a_name_by_its_class():
    try:

        class Frozen(AdjustmentRule, name="frozen"):
            def held(self, use, name, sparsity):
                return torch.ones_like(use.covered[name])

        strategy = make(HAT, adjustment="frozen", train_epochs=1)
        before = values(strategy.model.backbone)
        strategy.train(permuted().train_stream[0])
        after = dict(strategy.model.backbone.named_parameters())
        assert all(torch.equal(value, after[name]) for name, value in before.items())
    finally:
        RULES.pop("frozen", None)
    with pytest.raises(ValueError, match=r"adjustment must be one of .*'adahat', or a rule, .* got 'frozen'"):
        make(HAT, adjustment="frozen")


def module_file(name):
    file = ROOT.joinpath(*name.split("."))
    return next((f for f in (file.with_suffix(".py"), file / "__init__.py") if f.exists()), None)


def imported(file):
    """Modules of the package that a file imports when it is imported."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("avalanche_amnesia"):
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                yield inside if module_file(inside) else node.module


def test_hat_needs_few_modules():
    seen, waiting = set(), ["avalanche_amnesia.training.strategies"]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            file = module_file(module)
            waiting += imported(file) if file.name != "__init__.py" else []
    modules = sorted(module for module in seen if module_file(module).name != "__init__.py")
    assert len(modules) <= MODULES_OF_HAT, modules
    assert not [name for name in modules if name.split(".")[1] in ("unlearning", "trajectory", "isolation", "audit")]
