"""Hash the first mini-batches of a training for its key in a store, without changing the training or its data."""

import signal
import warnings
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from itertools import islice
from multiprocessing import current_process, get_all_start_methods, get_context
from typing import Any

import torch
from avalanche.training.templates import SupervisedTemplate
from avalanche.training.utils import trigger_plugins
from torch import Tensor
from torch.utils._pytree import tree_leaves

from avalanche_amnesia.bits import tensor_hash
from avalanche_amnesia.seeding import preserved_rng, rng_state, set_rng_state
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.lookup import dispatch_to, set_attributes
from avalanche_amnesia.training.plugins.seeding import SeedingPlugin
from avalanche_amnesia.unlearning.assumptions import open_in, replaced_methods

_WORK: list[Callable[[], str]] = []
"""In a copy of the process: what it computes."""


class NotRepeatableError(Exception):
    """Error: a training's first mini-batches could not be read, or differed when they were read a second time."""


def without_side_effects(read: Callable[[], str], strategy: Strategy, *inputs: Any) -> str:
    """Return ``read()``; if the strategy or ``inputs`` contain user code, call it in a fork without side effects.

    Where processes can't be copied (Windows, with a GPU, workers of ``multiprocessing.Pool``), this process calls it.

    Raises:
        NotRepeatableError: that copy ended without an answer, or needed more than 300 seconds.
    """
    is_open = any(True for _ in open_in([*type(strategy).__mro__, *inputs, replaced_methods(strategy)]))
    # CUDA can't be used after a fork, and reading looks at its random state.
    if not is_open or current_process().daemon or torch.cuda.is_available() or "fork" not in get_all_start_methods():
        return read()
    # As a worker of torch's DataLoader, but one that may have such workers itself.
    with ProcessPoolExecutor(1, get_context("fork"), _start_copy, (read,)) as copy:
        try:
            return copy.submit(_call_in_copy).result()
        except (BrokenExecutor, SystemExit) as error:
            raise NotRepeatableError("the process that read its data ended, or needed more than 300 s") from error


def _start_copy(read: Callable[[], str]) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(300)  # seconds until the copy is killed: first, because all else may wait for a lock
    _WORK.append(read)


def _call_in_copy() -> str:
    torch.set_num_threads(1)  # a copy has no other threads, and may wait for a lock that one of them held
    return _WORK[0]()


def first_batches(strategy: Strategy, experience: Any, steps: int, **options: Any) -> list[list[str]]:
    """Hash all tensors of a training's first ``steps`` mini-batches; raise an error if a second read gives others."""
    host: Any = strategy  # the methods called here are not public
    plugins = [plugin for plugin in strategy.plugins if isinstance(plugin, SeedingPlugin)]
    attributes = dict(vars(strategy))
    with preserved_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the training itself warns
        try:
            dispatch_to(strategy, plugins)
            vars(strategy).update(experience=experience, is_training=True, _stop_training=False)
            host._before_train_dataset_adaptation(**options)
            SupervisedTemplate.train_dataset_adaptation(host)  # the method of Cumulative adds earlier data
            host.make_train_dataloader(**options)
            trigger_plugins(strategy, "before_training_exp", **options)
            random = rng_state()
            first, second = (_hash_batches(strategy, steps, random) for _ in range(2))
        except Exception as error:  # any error that refuses the task; the training itself raises it again
            what = f"{type(error).__name__}: {error}"
            raise NotRepeatableError(f"the training could not begin without plugins of others: {what}") from error
        finally:
            set_attributes(strategy, attributes)
    other = next((at for at, pair in enumerate(zip(first, second, strict=True), 1) if pair[0] != pair[1]), None)
    if other is not None:
        told = f"its data gave another mini-batch in step {other} the second time"
        raise NotRepeatableError(f"the training is not repeatable: {told}")
    return first


def _hash_batches(strategy: Strategy, steps: int, random: Any) -> list[list[str]]:
    set_rng_state(random)
    some = islice(strategy.dataloader, steps)
    return [[tensor_hash(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)] for batch in some]
