"""References of another benchmark than the run's are refused before a task is trained or measured."""

from functools import partial

import pytest
import torch
from support import strategies
from support.strategies import learn, quiet
from torch.optim import Adam

from avalanche_amnesia import evaluation
from avalanche_amnesia.benchmarks import PermutedDigits, SplitDigits, task_benchmark, with_unlearning
from avalanche_amnesia.evaluation.references import ReferencesError

SIZES = {"n_train": 60, "n_test": 40}
PLAIN = PermutedDigits(3, **SIZES)
RUN = with_unlearning(PLAIN, {2: [0]}, permanent=[1], deadline=3)
make = partial(strategies.make, hidden=(12,), features=8, optimizer=Adam, train_mb_size=20, train_epochs=1)


def inverted():
    """Return the run's tasks with its labels and other pictures."""
    train, test = (stream[0].tensors for stream in (PLAIN.train_stream, PLAIN.test_stream))
    return task_benchmark(train, test, [list(range(10))] * 3, transforms=[lambda x: 1 - x] * 3)


MORE = with_unlearning(PermutedDigits(3, n_train=80, n_test=40), {}, [1], 3)
OTHERS = [
    (lambda: with_unlearning(inverted(), {}, [1], 3), "task 0: the samples of its training data differ"),
    (lambda: with_unlearning(PermutedDigits(3, seed=1, **SIZES), {}, [1], 3), "task 0: the labels of its training"),
    (lambda: MORE, "task 0: 60 training samples in the run, and 80 there"),
    (lambda: with_unlearning(SplitDigits(n_train=60), {}, [1], 3), "task 0: "),
    (lambda: with_unlearning(PLAIN, {}, [1]), "deadline=3 in the run, and deadl"),
    (lambda: with_unlearning(PLAIN, {}, deadline=3), "task 1: permanent=True in the run, and permanent=False there"),
    (lambda: with_unlearning(PermutedDigits(2, **SIZES), {}, [1], 3), r"task 2 is none of theirs, \[0, 1\]"),
]
METRICS = {
    "jsd": lambda references: evaluation.jsd_metrics(references, noise_floor=()),
    "difference": evaluation.accuracy_difference_metrics,
    "accuracy": lambda references: evaluation.unlearned_accuracy_metrics(RUN, references),
}


def test_another_benchmark_is_refused_before_the_first_different_task():
    for number, (other, words) in enumerate(OTHERS):
        for name in METRICS if number == 1 else ["jsd"]:
            strategy = make(evaluator=quiet(*METRICS[name](evaluation.References(make, other()))))
            with pytest.raises(ReferencesError, match=words) as refused:
                strategy.train(RUN.train_stream)
            assert "References(make_strategy, benchmark) with the benchmark whose train_stream" in str(refused.value)
            assert strategy.clock.train_iterations in (0, 3, 6)


def test_a_benchmark_made_again_from_the_same_data_is_the_same():
    references = evaluation.References(make, with_unlearning(PermutedDigits(3, **SIZES), {}, permanent=[1], deadline=3))
    strategy = make(evaluator=quiet(*(metric for of in METRICS.values() for metric in of(references))))
    drawn = torch.get_rng_state()
    learn(strategy, RUN.train_stream)
    assert "JSD_own/eval_phase/test_stream" in strategy.eval(RUN.test_stream)
    assert torch.equal(torch.get_rng_state(), drawn)


def test_random_transforms_are_no_difference():
    class Noisy(torch.utils.data.Dataset):
        targets = [0, 1] * 20

        def __len__(self):
            return 40

        def __getitem__(self, item):
            return torch.full((64,), float(item)) + torch.randn(64), self.targets[item]

    made = [task_benchmark(Noisy(), Noisy(), [[0, 1]]) for _ in range(2)]
    strategy = make(evaluator=quiet(*evaluation.accuracy_difference_metrics(evaluation.References(make, made[0]))))
    strategy.train(made[1].train_stream[0])
    assert strategy.clock.train_iterations == 2


def test_metrics_added_after_the_training_compare_the_labels():
    strategy = learn(make(), RUN.train_stream)
    late = quiet(*METRICS["jsd"](evaluation.References(make, MORE)))
    strategy.plugins[strategy.plugins.index(strategy.evaluator)] = late
    strategy.evaluator = late
    with pytest.raises(ReferencesError, match="other labels, or another number of samples"):
        strategy.eval(RUN.test_stream)
