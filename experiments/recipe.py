"""Measure the gain in accuracy by label smoothing, averaged weights and random features, for two exact methods.

    python -m experiments.recipe --root DATA --validation 101              # held-out training images: six rates each
    python -m experiments.recipe --root DATA --test 31 32 33 34 35         # test images, with the best learning rate

Adds results to ``experiments/results/recipe.json``, skips runs that it contains, and writes the table next to it.
"""

import tempfile
import time
from itertools import product
from pathlib import Path

import torch
from torch import nn

from avalanche_amnesia.contrib.metrics.statistics import paired_test
from avalanche_amnesia.training import AveragedWeights, RandomFeatures, UnlearningPlugin, save_state
from avalanche_amnesia.training.host.lookup import find_plugin
from experiments.comparison import BETWEEN, STREAMS, benchmark_of, rates_of, remaining_accuracy
from experiments.methods import make
from experiments.trials import Settings, arguments, best, measured, rows_of, rows_tested, search, spread

OUTPUT = Path("experiments/results/recipe.json")
RECIPES = {
    "plain": (0.0, list),
    "label smoothing": (0.1, list),
    "all three": (0.1, lambda: [AveragedWeights(), RandomFeatures()]),
}
"""Recipe → label smoothing of the loss, and a function that returns the plugins."""
METHODS = ("DisjointSubnets", "Independent")
ORDER = ("glyphs", "rotated", "permuted 20", "permuted fashion", "omniglot", "permuted", "split cifar")
NOTES = """Streams, networks, epochs and requests are those of the [comparison](comparison.md). Each row has six
learning rates of Adam on held out training images (seed 101), and five seeds (31 to 35) on test images. *Label
smoothing*: .1. *All three*: with it `AveragedWeights(.3)` and `RandomFeatures(2000)`. Accuracy (%) of the tasks that
remain after all requests, ± standard deviation. *Independent* has a network of full size for each task.
DisjointSubnets' records claim `exact`; Independent's are `conditional`, as a plugin of this script fits its heads.
Label smoothing alone was not run on Omniglot and split CIFAR-10."""
PAIRED = """Points above *Independent, plain*: mean over the same seeds with its 95 % interval (Student's), bold where
the interval does not contain 0."""
COST = """Bytes of a saved state after the last request, and CPU seconds of the training with its requests (while other
programs ran), both relative to the method's plain row. *Independent, label smoothing* ran later than the other rows
(but on glyphs), with more programs: its seconds are too many."""


def run(stream, method, recipe, seed, settings, root, validation):
    """Train one method with one recipe; return accuracy on the remaining tasks, claims, bytes and CPU seconds."""
    smoothing, plugins = RECIPES[recipe]
    benchmark = benchmark_of(method, stream, seed, root, validation)
    loss = nn.CrossEntropyLoss(label_smoothing=smoothing)
    began = time.process_time()
    strategy = make(method, STREAMS[stream], seed, benchmark, settings, criterion=loss, plugins=plugins())
    strategy.train(benchmark.train_stream)
    row = {"seconds": round(time.process_time() - began, 1)}
    row["accuracy"] = remaining_accuracy(strategy.model, stream, benchmark)
    row["claims"] = sorted({record.claim for record in find_plugin(strategy, UnlearningPlugin).records})
    with tempfile.TemporaryDirectory() as folder:
        save_state(strategy, Path(folder) / "state")
        row["bytes"] = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    return row


def table(rows):
    streams = [stream for stream in ORDER if rows_tested(rows, stream=stream)]
    head = [f"| method | {' | '.join(streams)} |", "|---" * (len(streams) + 1) + "|"]

    def accuracies(method, recipe, stream):
        mine = rows_tested(rows, method=method, recipe=recipe, stream=stream)
        return {row["seed"]: 100 * row["accuracy"] for row in mine}

    def beyond(method, recipe, stream):
        first, mine = accuracies("Independent", "plain", stream), accuracies(method, recipe, stream)
        seeds = sorted(first.keys() & mine.keys())
        if len(seeds) < 2:
            return "–"
        test = paired_test([mine[seed] for seed in seeds], [first[seed] for seed in seeds])
        low, high = test.interval or (0, 0)
        told = f"{test.mean_difference:+.1f} ({low:+.1f} to {high:+.1f})".replace("-", "−")
        return f"**{told}**" if low * high > 0 else told

    def cost(method, recipe, stream):
        ratios = []
        for what in ("bytes", "seconds"):
            mine, plain = (
                [row[what] for row in rows_tested(rows, method=method, recipe=one, stream=stream)]
                for one in (recipe, "plain")
            )
            ratios.append(f"{sum(mine) / sum(plain):.2f}" if mine and len(mine) == len(plain) else "–")
        return ", ".join(ratios)

    def told(method, recipe, stream):
        return spread(list(found.values())) if (found := accuracies(method, recipe, stream)) else "–"

    def rate(method, recipe, stream):
        what = {"method": method, "recipe": recipe, "stream": stream}
        chosen = best(rows, "settings", **what)
        if chosen is None:
            return "–"
        tried = [row["settings"]["lr"] for row in rows if row["validation"] and what.items() <= row.items()]
        return f"{chosen['lr']:g}{' *' if chosen['lr'] in (min(tried), max(tried)) else ''}"

    lines = ["# A recipe for exact methods", "", NOTES]
    parts = {"In short": told, "Points above a network per task": beyond, "Bytes and seconds": cost, "Rates": rate}
    after = {
        "Points above a network per task": PAIRED,
        "Bytes and seconds": COST,
        "Rates": "An asterisk marks an end of those tried.",
    }
    for title, cell in parts.items():
        lines += ["", f"## {title}", "", *head]
        for method, recipe in product(METHODS, RECIPES):
            cells = [cell(method, recipe, stream) for stream in streams]
            if any(cell.strip("–, ") for cell in cells):
                lines.append(f"| {method}, {recipe} | {' | '.join(cells)} |")
        lines += ["", after[title]] if title in after else []
    return "\n".join(lines) + "\n"


def main():
    parser = arguments(__doc__)
    parser.add_argument("--streams", nargs="+", choices=ORDER, default=ORDER)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for stream, method, recipe in product(options.streams, options.methods, options.recipes):
        what = {"stream": stream, "method": method, "recipe": recipe}

        def trial(settings, seed, validation, what=what):
            row = what | {"seed": seed, "validation": validation, "settings": vars(settings) | {"options": {}}}
            return measured(
                OUTPUT,
                row,
                lambda: run(settings=settings, root=options.root, **{k: v for k, v in row.items() if k != "settings"}),
                table,
            )

        for seed in options.validation:
            search(rates_of(method, stream), None, BETWEEN, lambda s, seed=seed: trial(s, seed, True)["accuracy"])
        for seed in options.test:
            chosen = best(rows_of(OUTPUT), "settings", **what)
            if chosen is not None:
                trial(Settings(**chosen), seed, False)


if __name__ == "__main__":
    main()
