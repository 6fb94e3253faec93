"""Share of a forgotten update that a measure of forgetting can see: put back a little of it, and read.

    python -m experiments.dose_response --root DATA
    python -m experiments.dose_response --seeds          # table and figure alone

Four tasks of permuted or rotated MNIST are learned by AmnesiacHAT as it is by default, the second one is unlearned, and
a share of its update is added to the backbone again. Every reading is relative to a model retrained without the task.
``permuted_trained_heads`` is permuted MNIST without the fit of heads at a task's end (``fit_head=False``).
Writes ``OUTPUT_<stream>_seed<n>.json``, and from all of these ``OUTPUT.md`` and ``OUTPUT.png``.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch
from matplotlib.figure import Figure
from torch.optim import Adam

from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.contrib.metrics import (
    detection_limit,
    dose_response,
    few_shot_accuracy,
    few_shots,
    linear_probe_accuracy,
    update_of,
)
from avalanche_amnesia.contrib.streams import PermutedMNIST, RotatedMNIST
from avalanche_amnesia.evaluation import References, accuracy, features_of, floor_ratio, jsd, take_probe
from avalanche_amnesia.models import MLP, MaskedModel
from avalanche_amnesia.training import EVEN_BUDGET, AmnesiacHAT

STREAMS = {
    "permuted": (PermutedMNIST, {}),
    "rotated": (RotatedMNIST, {}),
    "permuted_trained_heads": (PermutedMNIST, {"masks": replace(EVEN_BUDGET, fit_head=False)}),
}
TASKS, FORGOTTEN, SHOTS = 4, 1, 5
SHARES = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0)
MEASURES = {
    "JSD": "through the mask that the task had; in units of its order floor",
    "JSD, no mask": "of the plain backbone, all units open; in units of its order floor",
    "old head": "accuracy through the head and mask that the task had, minus that of the head on the retrained model",
    "few shots": f"accuracy of a head fitted to {SHOTS} samples per class, minus that on the retrained model",
    "linear probe": "accuracy of a head fitted to all training samples, minus that on the retrained model",
}


def run(options, name, seed):
    """Readings of one run: measure → share → reading; and those of another retrained model, which is clean."""
    stream, method = STREAMS[name]
    benchmark = stream(TASKS, seed=seed, n_train=options.n_train, n_test=options.n_test, root=options.root)

    def make(**kwargs):
        torch.manual_seed(seed)
        model = MaskedModel(MLP(784, hidden=(256, 100), features=64))
        optimizer = Adam(model.parameters(), lr=1e-3)
        training = {"train_mb_size": 64, "train_epochs": options.epochs}
        return AmnesiacHAT(model=model, optimizer=optimizer, seed=seed, **training, **method, **kwargs)

    references = References(make, benchmark)
    remaining = [task for task in range(TASKS) if task != FORGOTTEN]
    reference, other = (references.reference(remaining, variant) for variant in ("same", "order"))
    strategy = make()
    for experience in benchmark.train_stream:
        strategy.train(experience)
    probe, update = take_probe(strategy.model, FORGOTTEN), update_of(strategy, FORGOTTEN)
    strategy.unlearn([FORGOTTEN])
    (x, y), (test_x, test_y) = (task_data(s[FORGOTTEN]) for s in (benchmark.train_stream, benchmark.test_stream))
    few = few_shots(y, SHOTS, seed)

    def features(model, inputs):
        return features_of(model, inputs, probe.mask)

    accuracies = {
        "old head": lambda model: accuracy(probe.head(features(model, test_x)), test_y),
        "few shots": lambda model: few_shot_accuracy(features(model, x[few]), y[few], features(model, test_x), test_y),
        "linear probe": lambda model: linear_probe_accuracy(features(model, x), y, features(model, test_x), test_y),
    }
    clean = {measure: read(reference) for measure, read in accuracies.items()}
    floors = {"JSD": jsd(other, reference, test_x, probe), "JSD, no mask": jsd(other, reference, test_x)}
    readings = {
        "JSD": lambda model: floor_ratio(jsd(model, reference, test_x, probe), floors["JSD"]),
        "JSD, no mask": lambda model: floor_ratio(jsd(model, reference, test_x), floors["JSD, no mask"]),
    }
    for measure, read in accuracies.items():
        readings[measure] = lambda model, read=read, measure=measure: read(model) - clean[measure]
    found = dose_response(strategy.model, update, SHARES, readings)
    return {
        "readings": {measure: {str(share): value for share, value in of.items()} for measure, of in found.items()},
        "retrained in another order": {measure: read(other) for measure, read in readings.items()},
        "order floors": floors,
        "accuracy on the retrained model": clean,
    }


def by_share(runs, measure):
    """Share → a reading per run."""
    return {share: [run["readings"][measure][str(share)] for run in runs] for share in SHARES}


def in_title(name):
    stream, _, heads = name.partition("_")
    return f"{stream.capitalize()} MNIST" + (f", {heads.replace('_', ' ')}" if heads else "")


def in_words(measure, value):
    return f"{value:.2f}" if measure.startswith("JSD") else f"{100 * value:+.1f}"


def table(by_stream, settings):
    lines = [
        "# What share of a forgotten update can be seen?",
        "",
        f"{TASKS} tasks of {settings['n_train']} training images, {settings['epochs']} epochs each, and",
        f"{settings['n_test']} test images; AmnesiacHAT by default, MLP 784-256-100-64, Adam 1e-3, batch 64. Task",
        f"{FORGOTTEN} is unlearned after the last one, and a share of its update put back into the backbone. Mean over",
        "seeds. *clean*: another retrained model, trained in another data order. *limit*: the smallest share told",
        "from 0, as is every larger one (exact one-sided rank-sum test over the seeds, p ≤ .05 for each share). *from",
        "clean*: the same against the clean models.",
        "",
        *(f"* {measure}: {meaning}" for measure, meaning in MEASURES.items()),
        "",
        "JSDs are ratios, accuracies are in points.",
    ]
    for name, by_seed in by_stream.items():
        runs = list(by_seed.values())
        floors, retrained = (
            {measure: mean(run[key][measure] for run in runs) for measure in runs[0][key]}
            for key in ("order floors", "accuracy on the retrained model")
        )
        lines += ["", f"## {in_title(name)}, seeds {', '.join(map(str, by_seed))}", ""]
        in_bits = ", ".join(f"{measure} {value:.4f} bit" for measure, value in floors.items())
        in_per_cent = ", ".join(f"{measure} {100 * value:.1f} %" for measure, value in retrained.items())
        lines += [f"Order floors: {in_bits}. On the retrained model: {in_per_cent}.", ""]
        lines += ["| measure | limit | from clean | clean | " + " | ".join(f"{share:g}" for share in SHARES) + " |"]
        lines += ["|---" * (len(SHARES) + 4) + "|"]
        for measure in MEASURES:
            readings = by_share(runs, measure)
            clean = [run["retrained in another order"][measure] for run in runs]
            limits = [detection_limit(readings), detection_limit(readings | {0.0: clean})]
            cells = ["none" if limit is None else f"**{limit:g}**" for limit in limits]
            cells += [in_words(measure, mean(values)) for values in (clean, *readings.values())]
            lines.append(f"| {measure} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def figure(by_stream):
    """A column per stream, JSDs above and accuracies below: a line per seed, the mean, the limit of detection."""
    picture = Figure(figsize=(4.4 * len(by_stream), 6), layout="constrained")
    panels = picture.subplots(2, len(by_stream), sharex=True, sharey="row", squeeze=False)
    colours = dict(zip(MEASURES, ("tab:blue", "tab:cyan", "tab:red", "tab:orange", "tab:green"), strict=True))
    for column, (name, by_seed) in enumerate(by_stream.items()):
        for row, of_jsd in enumerate((True, False)):
            ax = panels[row][column]
            for measure in (m for m in MEASURES if m.startswith("JSD") == of_jsd):
                readings = by_share(list(by_seed.values()), measure)
                scaled = {share: [v if of_jsd else 100 * v for v in values] for share, values in readings.items()}
                for values in zip(*scaled.values(), strict=True):
                    ax.plot(SHARES, values, color=colours[measure], linewidth=0.6, alpha=0.45)
                ax.plot(SHARES, [mean(v) for v in scaled.values()], color=colours[measure], linewidth=2, label=measure)
                limit = detection_limit(readings)
                if limit is not None:
                    ax.plot([limit], [mean(scaled[limit])], "o", color=colours[measure], markersize=9, mec="black")
            ax.axhline(1 if of_jsd else 0, color="black", linestyle=":", linewidth=1)
            ax.grid(alpha=0.3)
            ax.legend(fontsize=8, loc="upper left")
        panels[0][column].set_yscale("log")
        panels[0][column].set_title(f"{in_title(name)}, {len(by_seed)} seeds", fontsize=10)
        panels[1][column].set_xlabel("share of the forgotten update that is put back")
    panels[0][0].set_ylabel("JSD / its order floor")
    panels[1][0].set_ylabel("accuracy minus the retrained\nmodel's (points)")
    picture.suptitle("Circles: smallest share that is told from 0. Dotted: as a retrained model", fontsize=10)
    return picture


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", default=None, help="data root (or the variable AMNESIA_DATA)")
    parser.add_argument("--streams", nargs="+", choices=STREAMS, default=list(STREAMS))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    parser.add_argument("--n-train", type=int, default=6000)
    parser.add_argument("--n-test", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("experiments/results/dose_response"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = {name: vars(options)[name] for name in ("n_train", "n_test", "epochs")}
    for name in options.streams:
        for seed in options.seeds:
            start = time.perf_counter()
            found = {"settings": settings, "stream": name, "seed": seed, **run(options, name, seed)}
            file = options.output.with_name(f"{options.output.name}_{name}_seed{seed}.json")
            file.write_text(json.dumps(found, indent=1) + "\n")
            print(file.name, f"{time.perf_counter() - start:.0f} s", flush=True)
    by_stream = {}
    for name in STREAMS:
        files = options.output.parent.glob(f"{options.output.name}_{name}_seed*.json")
        found = sorted((json.loads(file.read_text()) for file in files), key=lambda run: run["seed"])
        if any(each["settings"] != settings for each in found):
            raise SystemExit(f"runs of {name} differ in their settings: choose another --output")
        if found:
            by_stream[name] = {each["seed"]: each for each in found}
    options.output.with_suffix(".md").write_text(table(by_stream, settings))
    figure(by_stream).savefig(options.output.with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
