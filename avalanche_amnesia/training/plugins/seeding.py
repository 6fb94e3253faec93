"""Seed the random draws of a task with (seed, task), so that earlier code and evaluations can't change them."""

from typing import TYPE_CHECKING, Any

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.data import labels_of
from avalanche_amnesia.processes import n_processes
from avalanche_amnesia.seeding import RngState, derive_seed, rng_state, seed_all, set_rng_state
from avalanche_amnesia.strategy import Plugin, Strategy

if TYPE_CHECKING:  # one process needs none of it
    from avalanche_amnesia.training.data_parallel import StepSync


class SeedingPlugin(Plugin):
    """Plugin that makes runs repeatable: initial heads and the order of data depend only on (seed, task).

    Put it first in the plugin list of one of Avalanche's own strategies; this package's strategies already have it. In
    a process group (``torchrun``) it also divides every mini-batch among the processes, and averages the gradients.

    Args:
        seed: new modules (heads) are drawn from it and the task.
        order_seed: all draws while a task trains (data order, dropout) derive from it and the task; ``seed`` by
            default. References use another one to measure the noise of training.

    Raises:
        ValueError: for a seed that is no integer.
        TaskError: on several processes, if their loss or BatchNorm would differ from those of one process.
        ProcessError: in a training, if a process has ended, or has other data, seeds or weights than the others.
    """

    seeds_tasks = True

    def __init__(self, seed: int = 0, order_seed: int | None = None) -> None:
        super().__init__()
        self.seed = checks.whole_number("seed", seed, None)
        self.order_seed = self.seed if order_seed is None else checks.whole_number("order_seed", order_seed, None)
        self._outside: RngState | None = None
        self._evaluations: list[RngState] = []
        self._steps: StepSync | None = None

    def before_training(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before the training: store the state of the global random generators, to restore it afterwards."""
        self.leave_step()
        self._outside, self._evaluations = rng_state(), []

    def before_train_dataset_adaptation(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before a task's training: seed the initial values of the task's modules."""
        seed_all(derive_seed(self.seed, "modules", *labels_of(strategy.experience)))

    def before_training_exp(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before a task's first step: seed data order and dropout."""
        self._steps = None
        if n_processes() > 1 and getattr(strategy, "divides_batches", True):
            from avalanche_amnesia.training.data_parallel import StepSync  # lazy: one process needs none of it

            self._steps = StepSync(self.order_seed)
        self._read_all(strategy, *(obj for plugin in strategy.plugins for obj in vars(plugin).values()))
        seed_all(derive_seed(self.order_seed, "order", *labels_of(strategy.experience)))

    def before_training_epoch(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before an epoch, in a process group: divide the mini-batches among the processes."""
        if self._steps is not None:
            self._steps.begin_epoch(strategy)

    def before_forward(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before the forward pass, in a process group: let BatchNorm use the samples of all processes."""
        if self._steps is not None:
            self._steps.begin_step(strategy)

    def after_backward(self, strategy: Strategy, **kwargs: Any) -> None:
        """After the backward pass, if this plugin divided the batch among processes: average their gradients."""
        if self._steps is not None:
            self._steps.reduce(strategy)

    def leave_step(self) -> None:
        """Undo :meth:`before_forward` after an error: let BatchNorm use only this process's samples again."""
        if self._steps is not None:
            self._steps.leave_step()

    def after_training_iteration(self, strategy: Strategy, **kwargs: Any) -> None:
        """After a step, in a process group: gather the outputs of all processes for metrics."""
        if self._steps is not None:
            self._steps.gather(strategy)

    def after_training_epoch(self, strategy: Strategy, **kwargs: Any) -> None:
        """After an epoch, in a process group: restore the strategy's undivided data loader."""
        if self._steps is not None:
            strategy.dataloader = strategy.dataloader.whole

    def after_training(self, strategy: Strategy, **kwargs: Any) -> None:
        """After the training: check that all processes agree, and restore the global random generators."""
        if self._steps is not None:
            self._steps.finish(strategy)
            self._steps = None
        if self._outside is not None:
            set_rng_state(self._outside)
            self._outside = None

    def before_eval(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before an evaluation: store the state of the random generators on a stack, because evaluations may nest."""
        self.leave_step()
        self._evaluations.append(rng_state())

    def before_eval_exp(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before a task's evaluation, in a process group: let every process read all samples."""
        self._read_all(strategy)

    def _read_all(self, strategy: Strategy, *others: Any) -> None:
        if n_processes() > 1:
            from avalanche_amnesia.training.data_parallel import read_all_samples

            read_all_samples(strategy.dataloader, *others)

    def after_eval(self, strategy: Strategy, **kwargs: Any) -> None:
        """After an evaluation: restore the state that the random generators had before it."""
        if self._evaluations:
            set_rng_state(self._evaluations.pop())
