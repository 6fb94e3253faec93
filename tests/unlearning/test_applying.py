"""Unlearning by AmnesiacHAT: removed and kept entries to the bit, the arithmetic of shared ones, plans and records."""

from avalanche.evaluation.metrics import accuracy_metrics
from support.strategies import DIGITS, ConvNet, amnesiac, quiet, trained
from support.strategy_state import initial_values, trajectory

from avalanche_amnesia.benchmarks import with_unlearning


def test_affected_tasks_are_those_that_own_a_changed_entry():
    strategy = trained(5, net=ConvNet, train_epochs=1)
    masks = {task: strategy.model.by_layer(strategy.model.binary_mask(task)) for task in range(5)}
    before = initial_values(strategy.model)
    size = trajectory(strategy).nbytes()
    record = strategy.unlearn([1])
    assert record.plan.trajectory_bytes == size - trajectory(strategy).nbytes() > 0
    moved = {name: p.detach() != before[name] for name, p in strategy.model.backbone.named_parameters()}
    uses = {task: strategy.model.graph.parameter_use(masks[task]) for task in (0, 2, 3, 4)}
    affected = [task for task, use in uses.items() if any((moved[n] & (use[n] > 0)).any() for n in moved)]
    assert list(record.affected) == affected
    assert affected  # the test would say nothing otherwise


def test_results_after_an_unlearning_leave_out_the_unlearned_task():
    benchmark = with_unlearning(DIGITS, {1: [0]})
    strategy = amnesiac(evaluator=quiet(accuracy_metrics(experience=True)), train_epochs=1)
    name = "Top1_Acc_Exp/eval_phase/test_stream/Task000/Exp000"
    strategy.train(benchmark.train_stream[0])
    assert name in strategy.eval(benchmark.test_stream)
    strategy.train(benchmark.train_stream[1])
    results = strategy.eval(benchmark.test_stream)
    assert name not in results
    assert "Top1_Acc_Exp/eval_phase/test_stream/Task001/Exp001" in results
    assert all(parameter.grad is None for parameter in strategy.model.parameters())
