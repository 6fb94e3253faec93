"""Names at the top of the package, and checks of registered functions."""

import importlib
import textwrap

import pytest
import torch
from avalanche.core import SupervisedPlugin
from support import tiny
from support.strategy_state import bits

import avalanche_amnesia
from avalanche_amnesia import register_purger, rule
from avalanche_amnesia.unit_graph import derives
from avalanche_amnesia.unit_graph.walk import RULES
from avalanche_amnesia.unlearning import BrokenPluginError
from avalanche_amnesia.unlearning.purging import purgers


def test_the_example_in_the_package_s_docstring_runs(capsys):
    code = textwrap.dedent(avalanche_amnesia.__doc__.partition("::\n")[2].partition("\nWith ")[0])
    exec(code, {})
    assert capsys.readouterr().out.splitlines()[-1] == "(0, 1, 3, 4)"


@pytest.mark.parametrize("room", ["", ".training", ".lab"])
def test_an_unknown_name_is_an_error_as_in_any_module(room):
    full = f"avalanche_amnesia{room}"
    with pytest.raises(AttributeError, match="zorkmid"):
        _ = importlib.import_module(full).zorkmid
    with pytest.raises(ImportError, match=f"cannot import name 'zorkmid' from '{full}'"):
        exec(f"from {full} import zorkmid")


class Counts(SupervisedPlugin):
    """Keeps a tensor that training changes."""

    def __init__(self):
        super().__init__()
        self.seen = torch.zeros(2)

    def after_training_exp(self, strategy, **kwargs):
        self.seen = self.seen + 1


def none(plugin, context, change):
    change.set(plugin, seen=torch.zeros(2))


def test_a_class_has_one_purger_that_must_return_its_result(monkeypatch):
    monkeypatch.setattr(purgers, "_PURGERS", dict(purgers._PURGERS))
    for wrong in (("P",), (Counts(),), (), (Counts, "P")):
        with pytest.raises(TypeError, match=r"takes the classes of plugins, @register_purger\(ThePlugin\), got"):
            register_purger(*wrong)
    with pytest.raises(TypeError, match="a purger is a function"):
        register_purger(Counts)(3)
    register_purger(Counts)(none)
    with pytest.raises(ValueError, match=r"Counts has the purger test_faces.none: give the new one its name"):
        register_purger(Counts)(lambda plugin, context, change: "other")
    register_purger(Counts)(none)  # a cell that runs again
    strategy = tiny.strategy(plugins=[Counts()])
    strategy.train(tiny.tasks().train_stream)
    before = bits(strategy.model)
    with pytest.raises(
        BrokenPluginError, match=r"the purger of Counts failed \(TypeError: it returned None, and must "
    ):
        strategy.unlearn([0])
    assert bits(strategy.model) == before
    assert strategy.model.tasks == (0, 1)


@pytest.mark.parametrize("register", [rule, derives])
def test_a_rule_must_be_registered_for_operations_of_an_exported_graph(register):
    for wrong in (("x",), (torch.relu,), (torch.nn.ReLU,), ()):
        with pytest.raises(TypeError, match=r"operations in an exported graph, such as torch.ops.aten.relu, got"):
            register(*wrong)
    with pytest.raises(TypeError, match="a rule is a function"):
        register(torch.ops.aten.digamma)(3)
    assert torch.ops.aten.digamma not in RULES
