"""Nothing that a strategy holds after an unlearning repeats the forgotten task's mask, gradients or last values."""

import copy
from functools import partial

import pytest
import torch
from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.training.plugins import EvaluationPlugin
from support import strategies
from support.residue_oracle import tensors_within
from support.strategies import learn, quiet
from support.strategy_state import state
from torch import nn

from avalanche_amnesia import RequestError, SplitDigits, with_unlearning
from avalanche_amnesia.training import ConstantRule
from avalanche_amnesia.training.plugins import DivergedError

amnesiac = partial(strategies.amnesiac, hidden=(32,), features=24, optimizer=torch.optim.Adam, train_mb_size=32)


def test_no_tensor_of_model_or_plugins_repeats_the_forgotten_mask():
    strategy = amnesiac()
    stream = SplitDigits().train_stream
    learn(strategy, stream[:2])
    mask = strategy.model.binary_mask(1)
    parts = [part for part in strategy.model.by_layer(mask).values() if part.any() and not part.all()]
    assert parts
    strategy.unlearn([1])
    reachable = tensors_within([strategy.model, [p for p in strategy.plugins if not isinstance(p, EvaluationPlugin)]])
    reachable += tensors_within(strategy.optimizer)
    assert len(reachable) > 10
    for tensor in reachable:
        for suspect in (mask, *parts):
            if tensor.shape == suspect.shape:
                for threshold in (0.0, 0.5):
                    assert not torch.equal(tensor > threshold, suspect)
    assert all(parameter.grad is None for parameter in strategy.model.parameters())


def test_a_copy_of_the_model_holds_no_gate_of_a_finished_task():
    strategy = learn(amnesiac(), SplitDigits().train_stream[:1])
    copied = copy.deepcopy(strategy.model)
    with pytest.raises(ValueError, match="no task is in training"):
        copied.gate  # noqa: B018 - a property


def test_results_do_not_repeat_the_last_accuracy_of_a_forgotten_task():
    benchmark = with_unlearning(SplitDigits(), {1: [0]})
    strategy = amnesiac(evaluator=quiet(accuracy_metrics(experience=True)))
    name = "Top1_Acc_Exp/eval_phase/test_stream/Task000/Exp000"
    strategy.train(benchmark.train_stream[0])
    assert name in strategy.eval(benchmark.test_stream)
    strategy.train(benchmark.train_stream[1])
    results = strategy.eval(benchmark.test_stream)
    assert name not in results
    assert "Top1_Acc_Exp/eval_phase/test_stream/Task001/Exp001" in results


def test_a_request_that_became_illegal_is_refused_before_the_training():
    benchmark = with_unlearning(SplitDigits(), {1: [0]})
    strategy = learn(amnesiac(), benchmark.train_stream[:1])
    strategy.mark_permanent([0])
    before = state(strategy.model)
    with pytest.raises(RequestError, match="after task 1: task 0 can't be unlearned: it was declared permanent"):
        strategy.train(benchmark.train_stream[1])
    after = strategy.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_after_a_diverged_task_everything_goes_on():
    stream = SplitDigits().train_stream
    strategy = learn(amnesiac(), stream[:1])
    strategy.optimizer.param_groups[0]["lr"] = 1e30
    with pytest.raises(DivergedError):
        strategy.train(stream[1])
    strategy.optimizer.param_groups[0]["lr"] = 1e-3
    assert strategy.unlearn([0]).claim == "exact"
    strategy.train(stream[1])
    assert strategy.model.tasks == (1,)
    assert all(isinstance(module, nn.Module) for module in strategy.model.heads.held.values())


def test_an_option_of_a_rule_belongs_to_the_rule():
    with pytest.raises(TypeError, match=r"AmnesiacHAT has no option 'alpha': write adjustment=AdaHATRule\(alpha=…\)"):
        amnesiac(alpha=7.0)
    amnesiac(adjustment=ConstantRule(alpha=0.5))
