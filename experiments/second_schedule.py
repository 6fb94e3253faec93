"""Compare exact methods on another schedule: unlearn two tasks, then samples of all tasks, then train a task again.

    python -m experiments.second_schedule --root DATA --test 21 22 23

Learning rates are the best ones of each method in the comparison. Adds results to
``experiments/results/second_schedule.json``, skips runs that it contains, and writes the table next to it.
"""

import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from avalanche_amnesia.contrib.streams.scenarios import Scenario
from avalanche_amnesia.seeding import derive_seed
from avalanche_amnesia.training import UnlearningPlugin, save_state
from avalanche_amnesia.training.host.lookup import find_plugin
from experiments.comparison import BY_CONSTRUCTION, STREAMS
from experiments.comparison import OUTPUT as COMPARISON
from experiments.methods import METHODS, Shards, make
from experiments.streams import accuracy_on
from experiments.trials import Row, Settings, arguments, best, measured, rows_of, rows_tested, spread

OUTPUT = Path("experiments/results/second_schedule.json")
CHOSEN = ("DisjointSubnets", "Independent", "SISA", "RanPAC")
PLACES = ("rotated", "permuted fashion", "glyphs")
SHARE = 0.01
NOTES = """`python -m experiments.second_schedule`: streams, networks and seeds of the [comparison](comparison.md), and
the learning rates that it had by then. Another schedule: in the middle of the stream tasks 0 and 1 are unlearned in one
request; after the last task, in every task that remains, one per cent of its samples, drawn by the seed; then task 0 is
learned again. Accuracy (%) of the tasks that remain at the end, on test images. CPU seconds: *training* of all tasks
before, *samples* one request for samples, with its two trainings (RanPAC: none), *again* the training of task 0.
*burst*: wall-clock seconds of the request for two tasks. *MB*: saved states at the end, in 2²⁰ bytes. All records claim
`exact`, or `conditional` where a plugin of these scripts fits heads. SISA has three networks for each task; a request
for samples trains those again that saw one of them, here all three."""


def run(stream: str, method: str, seed: int, settings: Settings, root: Path) -> Row:
    """Run one method on the schedule with one seed; return accuracy, CPU seconds per part, bytes and claims."""
    setup, shards = replace(STREAMS[stream], requests={}), METHODS[method].shards
    schedule = Scenario({setup.n_tasks // 2: [0, 1]}, order=(*range(setup.n_tasks), 0))
    parts = [schedule.on(setup.benchmark(root, seed, False, slice(n, None, shards))) for n in range(shards)]
    strategies = [make(method, setup, seed, part, settings) for part in parts]
    spent = {name: [0.0] for name in ("training", "samples", "again")}
    for part, strategy in zip(parts, strategies, strict=True):
        began = time.process_time()
        for experience in part.train_stream[: setup.n_tasks]:
            strategy.train(experience)
        spent["training"][0] += time.process_time() - began
    burst = sum(find_plugin(strategy, UnlearningPlugin).records[0].seconds for strategy in strategies)
    for task in range(2, setup.n_tasks):
        began = time.process_time()
        for number, (part, strategy) in enumerate(zip(parts, strategies, strict=True)):
            n, drawn_from = len(part.train_stream[task].dataset), (seed, "asked", task, *range(number))
            generator = torch.Generator().manual_seed(derive_seed(*drawn_from))
            asked = sorted(torch.randperm(n, generator=generator)[: int(SHARE * n)].tolist())
            strategy.unlearn(task=task, samples=asked, data=part.train_stream[task])
        spent["samples"].append(time.process_time() - began)
    for part, strategy in zip(parts, strategies, strict=True):
        began = time.process_time()
        strategy.train(part.train_stream[setup.n_tasks])
        spent["again"][0] += time.process_time() - began
    models = [strategy.model for strategy in strategies]
    model = Shards(models) if shards > 1 else models[0]
    left = [each for each in parts[0].test_stream if each.task_label != 1]
    left = list({each.task_label: each for each in left}.values())
    records = [record for strategy in strategies for record in find_plugin(strategy, UnlearningPlugin).records]
    return {
        "accuracy": mean(accuracy_on(model, each) for each in left),
        "training": spent["training"][0] - burst,
        "burst": burst,
        "samples": mean(spent["samples"][1:]),
        "again": spent["again"][0],
        "bytes": bytes_of(strategies),
        "claims": sorted({record.claim for record in records}),
    }


def bytes_of(strategies: Iterable[Any]) -> int:
    """Return the total bytes of the strategies' saved states."""
    total = 0
    for strategy in strategies:
        with tempfile.TemporaryDirectory() as folder:
            save_state(strategy, Path(folder) / "state")
            total += sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    return total


def table(rows: list[Row]) -> str:
    lines = ["# A second schedule", "", NOTES]
    for stream in PLACES:
        lines += ["", f"## {stream.capitalize()}", ""]
        lines += ["| method | accuracy | training | burst | samples | again | MB |", "|---" * 7 + "|"]
        for method in CHOSEN:
            mine = rows_tested(rows, stream=stream, method=method)
            if mine:
                assert all(set(row["claims"]) <= BY_CONSTRUCTION for row in mine), method
                cells = [spread([100 * row["accuracy"] for row in mine])]
                for name, digits in (("training", 1), ("burst", 3), ("samples", 2), ("again", 2)):
                    cells.append(f"{mean(row[name] for row in mine):.{digits}f}")
                cells.append(f"{mean(row['bytes'] for row in mine) / 2**20:.1f}")
                lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--streams", nargs="+", choices=PLACES, default=PLACES)
    parser.add_argument("--methods", nargs="+", choices=CHOSEN, default=CHOSEN)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tried = rows_of(COMPARISON)
    for stream, method, seed in product(options.streams, options.methods, options.test):
        found = best(tried, "settings", stream=stream, method=method, fitted=True)
        if found is None and METHODS[method].chosen:
            continue  # the comparison has not tried this method on this stream
        found = found or {"optimizer": "", "lr": 0.0}
        what = {"stream": stream, "method": method, "seed": seed, "validation": False}

        def made(found=found, stream=stream, method=method, seed=seed):
            return run(stream, method, seed, Settings(**found), options.root)

        measured(options.output, what, made, table)


if __name__ == "__main__":
    main()
