"""Measure the effect of each option of AmnesiacHAT, with all other options at their defaults, on permuted digits.

    python -m experiments.single_options

Each run learns five tasks without a request, then unlearns the second task. No default was chosen by these results.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import torch

from avalanche_amnesia.training import EVEN_BUDGET, AdjustmentRule, ConstantRule
from experiments.mask_settings import COLUMNS, run

PRICED = replace(EVEN_BUDGET, budget=None, sparsity_weight=0.5)
OPTIONS = {
    "defaults": {},
    **{
        f"{name}={value!r}": {"masks": replace(EVEN_BUDGET, **{name: value})}
        for name, value in [
            *(("reuse", 0.0), ("reuse", 0.25), ("reuse", 1.0), ("warm_up", 0.1), ("warm_up", 0.9), ("min_units", 8)),
            *(("s_max", 400.0), ("embedding_lr", 0.05), ("embedding_init", "normal"), ("annealing", "cosine")),
            *(("embedding_clamp", 3.0), ("embedding_clamp", 12.0), ("compensation_clamp", 5.0), ("fit_head", False)),
        ]
    },
    "budget=None, sparsity_weight=0.5": {"masks": PRICED},
    **{
        f"the same, {name}={value!r}": {"masks": replace(PRICED, **{name: value})}
        for name, value in (
            ("sparsity", "cross"),
            ("sparsity", "quota"),
            ("min_units", 8),
            ("embedding_init", "sparse"),
        )
    },
    "adjustment='adahat'": {"adjustment": "adahat"},
    "adjustment='random'": {"adjustment": "random"},
    "ConstantRule(0.5)": {"adjustment": ConstantRule(0.5)},
    "AdjustmentRule(between='max')": {"adjustment": AdjustmentRule(between="max")},
    "AdjustmentRule(space='gradient')": {"adjustment": AdjustmentRule(space="gradient")},
    "AdjustmentRule(locked=[0])": {"adjustment": AdjustmentRule(locked=[0])},
    "reset_optimizer=False": {"reset_optimizer": False},
}


def table(results):
    """Return a Markdown page with means and standard deviations over the seeds, one row per option."""
    seeds = sorted({row["seed"] for row in results})
    lines = [
        "# One option of AmnesiacHAT at a time",
        "",
        "`python -m experiments.single_options`: permuted digits, five",
    ]
    lines[-1] += f" tasks, MLP 64-256-100-64, Adam 1e-3, seeds {seeds}; in per cent. The request names the second task."
    lines += ["", *(f"* {name}: {meaning}" for name, meaning in COLUMNS.items()), ""]
    lines += ["| " + " | ".join(["option", *COLUMNS]) + " |", "|---" * (1 + len(COLUMNS)) + "|"]
    for name in OPTIONS:
        rows = [row for row in results if row["option"] == name]
        spread = [[100 * row[column] for row in rows] for column in COLUMNS]
        cells = [f"{mean(values):.1f} ± {stdev(values) if len(values) > 1 else 0:.1f}" for values in spread if values]
        lines += ["| " + " | ".join([f"`{name}`", *cells]) + " |"] if cells else []
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=Path("experiments/results/single_options"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = options.output.with_suffix(".json")
    results = json.loads(found.read_text()) if found.exists() else []
    done = {(row["option"], row["seed"]) for row in results}
    for seed in options.seeds:
        for name, chosen in OPTIONS.items():
            if (name, seed) not in done:
                results.append({"option": name, "seed": seed, **run("permuted digits", chosen, seed, None)})
                print(results[-1], flush=True)
                found.write_text(json.dumps(results, indent=1) + "\n")
                options.output.with_suffix(".md").write_text(table(results))


if __name__ == "__main__":
    main()
