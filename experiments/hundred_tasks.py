"""Weight pools on a hundred tasks: times of training, unlearning, evaluation and saving, for early and late tasks.

    python -m experiments.hundred_tasks --root DATA

Permuted MNIST, 1,000 images per task. Each task is unlearned after fourteen further tasks. Every twentieth task is not
unlearned: the deadline of fifteen tasks makes it permanent, and from then on new tasks use its weights. Prints a table.
"""

import argparse
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import mean, median

import torch
from torch.optim import Adam

from avalanche_amnesia import DisjointModel, DisjointSubnets, with_unlearning
from avalanche_amnesia.benchmarks.families import permuted
from avalanche_amnesia.isolation import Pools
from avalanche_amnesia.models import MLP
from experiments.streams import STREAMS, accuracy_on

N, STAYS, LIFE = 100, 20, 14


def timed(spent, name, work):
    began = time.process_time()
    result = work()
    spent.setdefault(name, []).append(1e3 * (time.process_time() - began))
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, required=True, help="data root")
    parser.add_argument("--seed", type=int, default=21)
    options = parser.parse_args()
    torch.set_num_threads(1)
    images = STREAMS["permuted"].images(options.root).subset(1000, 1000, options.seed)
    requests = {task + LIFE: [task] for task in range(N - LIFE) if task % STAYS}
    benchmark = with_unlearning(permuted(images, N, options.seed), requests, deadline=LIFE + 1)
    pools = Pools.planned(benchmark)
    torch.manual_seed(options.seed)
    model = DisjointModel(MLP(784, hidden=(256,), features=256))
    strategy = DisjointSubnets(
        model=model,
        optimizer=Adam(model.parameters(), lr=1e-2),
        isolation=pools,
        train_mb_size=64,
        train_epochs=5,
        seed=options.seed,
    )
    obeying = next(plugin for plugin in strategy.plugins if hasattr(plugin, "records"))
    spent, learned = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for trained, tested in zip(benchmark.train_stream, benchmark.test_stream, strict=True):
            timed(spent, "train", partial(strategy.train, trained))
            learned.append(timed(spent, "evaluate a task", partial(accuracy_on, model, tested)))
            timed(spent, "save", partial(strategy.save, folder))
    records = obeying.records
    spent["unlearn"] = [1e3 * record.seconds for record in records]
    left = [accuracy_on(model, tested) for tested in benchmark.test_stream if tested.task_label in model.tasks]
    size = sum(value.nbytes for value in model.state_dict().values()) / 2**20
    assert isinstance(pools.slots, Mapping)  # as it was planned
    print(f"{1 + max(pools.slots.values())} slots, {len(model.tasks)} tasks remain, {model.free_share():.2f} free")
    print(f"{sum(record.claim == 'exact' for record in records)} of {len(records)} exact, {size:.1f} MB")
    print(f"accuracy when trained: first ten {mean(learned[:10]):.3f}, last ten {mean(learned[-10:]):.3f}")
    print(f"of the remaining at the end {mean(left):.3f}")
    for name, values in spent.items():
        print(f"{name}: tenth to twentieth {median(values[10:20]):.1f} ms, last ten {median(values[-10:]):.1f} ms")


if __name__ == "__main__":
    main()
