"""Compare this package's default AmnesiacHAT with the published method: permuted MNIST, the paper's five tasks.

    python -m experiments.published --root DATA --seeds 1 2 3 4 5

Adds a file per seed to ``experiments/results/published/``, and writes ``experiments/results/published.md`` from all
these files. No setting was chosen on these seeds.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import mean

import torch
from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.logging import BaseLogger
from avalanche.training.plugins import EvaluationPlugin
from torch.optim import Adam

from avalanche_amnesia.evaluation import (
    References,
    accuracy_difference_metrics,
    jsd_metrics,
    unlearned_accuracy_metrics,
)
from avalanche_amnesia.models import MaskedModel
from avalanche_amnesia.training import PAPER_ALPHA, AdaHATRule, AmnesiacHAT, HardAttention
from avalanche_amnesia.training.host.lookup import remaining_experiences
from experiments.published_copies import PublishedCopies
from experiments.published_differences import (
    ALL,
    BUILD,
    OUTPUT,
    STREAM,
    THEIRS,
    authors_rows,
    cell,
    kept_by,
    options_of,
)


def _as_written(seed):
    return {
        "masks": HardAttention(),
        "adjustment": AdaHATRule(alpha=PAPER_ALPHA),
        "compensation": PublishedCopies(seed=seed),
    }


AS_PUBLISHED = {**BUILD, **ALL}
VARIANTS = {
    "default": lambda seed: {},
    "as published": lambda seed: options_of(AS_PUBLISHED, seed),
    "as written": _as_written,
    "as written, deletion alone": lambda seed: _as_written(seed) | {"compensation": "none"},
}
BUILDS = {"as published": AS_PUBLISHED}
AUTHORS = "authors' code"
MEASURES = {
    "remaining": ("mean accuracy of the two tasks that remain", 100),
    "ad": ("AD: the same minus that of a model that never unlearned", 100),
    "control": ("what that model gains with its heads fitted anew alone, the control of AD", 100),
    "jsd": ("JSD to the retrained model, own mask, in millibits", 1000),
    "ratio": ("JSD / its floor, the JSD between two retrained models of another data order", 1),
    "old_head": ("accuracy on the unlearned tasks through the heads and masks they had", 100),
    "reference_head": ("what the same heads read from the retrained model", 100),
}
NOTES = """# AmnesiacHAT beside the published method

```bash
python -m experiments.published --root DATA --seeds 1 2 3 4 5
```

Permuted MNIST, all 60,000 training images, MLP 784-256-100-64, five tasks of two epochs, mini-batches of 128, Adam
1e-3. Task 0 is unlearned after task 1, task 1 after task 3, task 4 after itself, as in the paper; tasks 2 and 3 remain.
Measured at the end, on the test images: means ± standard deviations over the seeds.

* *default*: `AmnesiacHAT(model=…, optimizer=…)`.
* *as published*: as the authors' code (CLArena) does it: with all nine things that differ from the paper's text, of
  which [published_differences](published_differences.md) has a row each.
* *authors' code* itself, run by us on the same images, permutations and initial weights, with seeds {authors} alone.
* *as written*: as the paper's text says: HAT's regulariser (0.75, s_max 400), AdaHAT with α = 1e-6, joint backup
  copies by unit from fresh weights, heads as training left them, no repair. One thing is not so, to its advantage: α
  scales updates. On gradients Adam undoes it, and what earlier tasks use moves: 66.5 % remain in place of 73.5, on
  20,000 images.
* *as written, deletion alone*: the same without backup copies.
"""

BETTER = """The same seeds, the same data. Better is higher for `remaining` and `ad`, lower for `jsd`, `ratio` and
`old_head`; `control` and `reference_head` are what `ad` and `old_head` are to be read against."""


def run(variant, seed, root):
    benchmark = STREAM.benchmark(root, seed)

    def make(**kwargs):
        torch.manual_seed(seed)
        model = MaskedModel(STREAM.network())
        optimizer = Adam(model.parameters(), lr=STREAM.lr)
        options = STREAM.training | VARIANTS[variant](seed) | kwargs
        return AmnesiacHAT(model=model, optimizer=optimizer, seed=seed, eval_mb_size=512, **options)

    with kept_by(BUILDS.get(variant, BUILD)):
        return measured(make, benchmark)


def measured(make, benchmark):
    references = References(make, benchmark)
    evaluator = EvaluationPlugin(
        accuracy_metrics(experience=True),
        accuracy_difference_metrics(references),
        jsd_metrics(references, probes=["own"], noise_floor=("order",)),
        unlearned_accuracy_metrics(benchmark, references),
        loggers=[BaseLogger()],
    )
    started = time.process_time()
    strategy = make(evaluator=evaluator)
    for experience in benchmark.train_stream:
        strategy.train(experience)
    left = remaining_experiences(strategy, benchmark.test_stream)
    results = strategy.eval(left)

    def found(name):
        return results[f"{name}/eval_phase/test_stream"]

    phase = "Top1_Acc_Exp/eval_phase/test_stream"
    return {
        "remaining": mean(results[f"{phase}/Task{e.task_label:03d}/Exp{e.task_label:03d}"] for e in left),
        "ad": found("AccuracyDifference"),
        "control": found("AccuracyDifference_control"),
        "jsd": found("JSD_own"),
        "ratio": found("JSD_own_ratio_order"),
        "old_head": found("UnlearnedAccuracy"),
        "reference_head": found("UnlearnedAccuracy_reference"),
        "seconds": round(time.process_time() - started, 1),
    }


def table(rows):
    seeds = sorted({row["seed"] for row in rows})
    by_seed = {(row["variant"], row["seed"]): row for row in rows}
    there = [v for v in VARIANTS if all((v, seed) in by_seed for seed in seeds)]
    values = {v: {m: [by_seed[v, seed][m] for seed in seeds] for m in MEASURES} for v in there}
    authors = [row for row in authors_rows(THEIRS[AUTHORS], 60_000) if row["seed"] in seeds]
    named = ", ".join(str(row["seed"]) for row in authors)
    lines = [
        NOTES.format(authors=named),
        *(f"* `{name}`: {meaning}" for name, (meaning, _) in MEASURES.items()),
    ]
    lines += ["", f"Seeds {', '.join(map(str, seeds))}; accuracies in per cent.", ""]
    lines += ["| | " + " | ".join(MEASURES) + " |", "|---" * (len(MEASURES) + 1) + "|"]
    for variant in there:
        cells = [cell(values[variant][measure], scale) for measure, (_, scale) in MEASURES.items()]
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    if authors:
        reached = {"remaining": [mean(row["remaining"]) for row in authors], "ad": [row["ad"] for row in authors]}
        cells = [cell(reached[name], 100) if name in reached else "–" for name in MEASURES]
        lines.append(f"| {AUTHORS} | {' | '.join(cells)} |")
    if len(there) > 1:
        lines += ["", "## Default minus the others", "", BETTER]
        lines += ["", "| default minus | " + " | ".join(MEASURES) + " |", "|---" * (len(MEASURES) + 1) + "|"]
        for variant in there[1:]:
            cells = []
            for measure, (_, scale) in MEASURES.items():
                pairs = zip(values["default"][measure], values[variant][measure], strict=True)
                cells.append(cell([ours - theirs for ours, theirs in pairs], scale, signed=True))
            lines.append(f"| {variant} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, required=True, help="data root")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the seeds' files, and name of the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.output.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        file = options.output / f"seed{seed}.json"
        for variant in options.variants:
            rows = json.loads(file.read_text()) if file.exists() else []
            if any(row["variant"] == variant for row in rows):
                continue
            rows.append({"variant": variant, "seed": seed} | run(variant, seed, options.root))
            print(rows[-1], flush=True)
            file.write_text(json.dumps(rows, indent=1) + "\n")
            everything = [
                row for each in sorted(options.output.glob("seed*.json")) for row in json.loads(each.read_text())
            ]
            options.output.with_suffix(".md").write_text(table(everything))


if __name__ == "__main__":
    main()
