"""Ablation of unlearning: the effects of deletion, compensation and repair, with one table row per combination.

    python experiments/ablation.py --root DATA
    python experiments/ablation.py --root DATA --rows backup-before repair-joint    # only these rows
    python experiments/ablation.py --rows                                 # no run, only table and figure

Permuted MNIST, five tasks; requests for task 0 after task 1, task 1 after task 3, task 4 after itself. Writes
``OUTPUT_seed<n>.json`` per seed, and from all seeds ``OUTPUT.md`` and ``OUTPUT.png``. Rows with equal adjustment rules
are compared with the same references: a model retrained without the unlearned tasks, and one that unlearned none.
"""

import argparse
import json
from pathlib import Path
from statistics import mean, stdev

import torch
from matplotlib.figure import Figure
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch.optim import Adam

from avalanche_amnesia.benchmarks import with_unlearning
from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.contrib.repair import RepairPlugin
from avalanche_amnesia.contrib.shadows import BackupPlugin
from avalanche_amnesia.contrib.streams import PermutedMNIST
from avalanche_amnesia.evaluation import References, floor_ratio, jsd, trajectory_bytes
from avalanche_amnesia.evaluation.functional import accuracy
from avalanche_amnesia.evaluation.probes import copy_probe, features_of
from avalanche_amnesia.evaluation.resolution import distance_in_words, two_digits
from avalanche_amnesia.models import MLP, MaskedModel
from avalanche_amnesia.training import AmnesiacHAT, HardAttention
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin
from avalanche_amnesia.unit_graph.backbones import evaluation_mode
from avalanche_amnesia.unlearning.logistic import fit_head
from experiments.scaled_updates import ScaledUpdatesPlugin

N_TASKS, DEADLINE = 5, 4
REQUESTS = {1: [0], 3: [1], 4: [4]}
SHOTS = 20  # labelled samples per class to which an attacker fits a linear probe


HAT_ROWS = {
    "nothing": {"obey": False},
    "nothing-refitted": {"obey": False, "refitted": True},
    "heads-only": {"obey": "head"},
    "exclusive": {"unlearning": lambda seed: UnlearningPlugin(deletion="exclusive")},
    "delete": {},
    "draft": {"compensation": lambda seed: ScaledUpdatesPlugin("draft")},
    "rate": {"compensation": lambda seed: ScaledUpdatesPlugin("rate")},
    "backup-before": {"compensation": lambda seed: BackupPlugin()},
    "counterfactual": {"compensation": "counterfactual"},
    "repair-joint": {"repair": lambda seed: RepairPlugin(seed=seed)},
    "counterfactual+repair-joint": {
        "compensation": "counterfactual",
        "repair": lambda seed: RepairPlugin(seed=seed),
    },
}
ADAHAT_ROWS = [
    "nothing",
    "nothing-refitted",
    "delete",
    "draft",
    "rate",
    "backup-before",
    "counterfactual",
    "repair-joint",
]
ADAHAT_ROWS += ["counterfactual+repair-joint"]
ROWS = HAT_ROWS | {f"adahat-{name}": HAT_ROWS[name] | {"adjustment": "adahat"} for name in ADAHAT_ROWS}
COLUMNS = {
    "accuracy": "mean of the remaining tasks, in per cent",
    "AD": "after each of the three requests: that accuracy minus that of the model that never forgot, in points",
    "JSD": "from the retrained model, on the forgotten tasks' data through the masks they had, in bits; how many times "
    "its order floor that is (floors: between retrained models of another data order, of another seed)",
    "old head": "accuracy on the forgotten tasks through the head and mask they had, in per cent",
    "few-shot": f"accuracy there of a linear probe fitted to {SHOTS} samples per class",
    "membership": "AUC of telling their training images from test images by the old head's loss",
    "seconds": "to unlearn, mean of the three requests; to retrain once",
    "KiB": "of recorded updates at the end",
    "claim": "of the last record; *bits* where all bits equal the retrained model's",
}


def make_strategy(options, seed, obey=True, **settings):
    torch.manual_seed(seed)
    model = MaskedModel(MLP(784, hidden=(256, 100), features=64))
    settings = {name: value(seed) if callable(value) else value for name, value in settings.items()}
    strategy = AmnesiacHAT(
        model=model,
        optimizer=Adam(model.parameters(), lr=1e-3),
        train_mb_size=128,
        train_epochs=options.epochs,
        masks=HardAttention(sparsity_weight=0.5, s_max=100.0, embedding_lr=0.02),
        seed=seed,
        **({"compensation": "none"} | settings),
    )
    find_plugin(strategy, UnlearningPlugin).obey = obey
    return strategy


class Laboratory:
    """Benchmark and reference models of one seed, with functions that run and measure one table row."""

    def __init__(self, options, seed):
        self.options, self.seed = options, seed
        stream = PermutedMNIST(N_TASKS, seed=seed, n_train=options.n_train, n_test=options.n_test, root=options.root)
        self.benchmark = with_unlearning(stream, {}, deadline=DEADLINE)
        self.train = {e.task_label: task_data(e) for e in self.benchmark.train_stream}
        self.test = {e.task_label: task_data(e) for e in self.benchmark.test_stream}
        self._references = {}

    def references(self, settings):
        """Return the references for the adjustment rule in ``settings``; no other setting affects how tasks train."""
        rule = {name: settings[name] for name in ("adjustment",) if name in settings}

        def make(**kwargs):
            return make_strategy(self.options, self.seed, **rule, **kwargs)

        key = tuple(sorted(rule.items()))
        if key not in self._references:
            self._references[key] = References(make, self.benchmark)
        return self._references[key]

    def accuracy(self, model, tasks):
        with evaluation_mode(model):
            return mean(accuracy(model(self.test[task][0], task), self.test[task][1]) for task in tasks)

    def accuracy_refitted(self, model, tasks):
        """Return the mean test accuracy of ``tasks`` with heads fitted again to the training data (a control)."""
        return mean(self._refitted(model, task) for task in tasks)

    def _refitted(self, model, task):
        (x, y), (x_test, y_test), mask = self.train[task], self.test[task], model.binary_mask(task)
        weight, bias = fit_head(features_of(model, x, mask), y, model.head(task).out_features)
        return accuracy(torch.nn.functional.linear(features_of(model, x_test, mask), weight, bias), y_test)

    def run(self, refitted=False, **settings):
        measured = self.accuracy_refitted if refitted else self.accuracy
        strategy = make_strategy(self.options, self.seed, **settings)
        references, plugin = self.references(settings), find_plugin(strategy, UnlearningPlugin)
        model, probes, differences = strategy.model, {}, []
        for experience in self.benchmark.train_stream:
            task = experience.task_label
            strategy.train(experience)
            if task in REQUESTS:
                probes |= {gone: copy_probe(model, gone) for gone in REQUESTS[task]}
                strategy.unlearn(REQUESTS[task])
                remaining = plugin.ledger.remaining
                full = self.accuracy(references.full(task + 1), remaining)
                differences.append(measured(model, remaining) - full)
        reference = references.reference(remaining)
        row = {"accuracy": measured(model, remaining), "accuracy_retrained": self.accuracy(reference, remaining)}
        row |= {"difference": differences, "jsd": self.jsd(model, reference, probes)}
        for floor in ("order", "seed"):
            row[f"jsd_{floor}"] = self.jsd(references.reference(remaining, floor), reference, probes)
        for attack in (self.old_head, self.few_shot, self.membership):
            for suffix, attacked in (("", model), ("_retrained", reference)):
                row[attack.__name__ + suffix] = mean(attack(attacked, task, probes[task]) for task in probes)
        row |= {"seconds": mean(record.seconds for record in plugin.records), "trajectory": trajectory_bytes(strategy)}
        row |= {"seconds_retrain": references.seconds(remaining), "claim": plugin.records[-1].claim}
        return row | {"same_bits": same_bits(model, reference)}

    def jsd(self, model, reference, probes):
        return mean(jsd(model, reference, self.test[task][0], probe) for task, probe in probes.items())

    def old_head(self, model, task, probe):
        x, y = self.test[task]
        return accuracy(probe.head(features_of(model, x, probe.mask)), y)

    def few_shot(self, model, task, probe):
        (x, y), (x_test, y_test) = self.train[task], self.test[task]
        shots = torch.cat([(y == label).nonzero()[:SHOTS, 0] for label in y.unique()])
        classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
        classifier.fit(features_of(model, x[shots], probe.mask), y[shots])
        return float(classifier.score(features_of(model, x_test, probe.mask), y_test))

    @torch.no_grad()
    def membership(self, model, task, probe):
        losses = []
        for x, y in (self.train[task], self.test[task]):
            x, y = x[: len(self.test[task][1])], y[: len(self.test[task][1])]
            logits = probe.head(features_of(model, x, probe.mask))
            losses.append(torch.nn.functional.cross_entropy(logits, y, reduction="none"))
        is_member = torch.cat([torch.ones_like(losses[0]), torch.zeros_like(losses[1])])
        return float(roc_auc_score(is_member, -torch.cat(losses)))


def same_bits(model, reference):
    ours, theirs = model.state_dict(), reference.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def path_of(options, seed):
    return options.output.with_name(f"{options.output.name}_seed{seed}.json")


def load(path, settings):
    """Load the results in the file ``path`` (none if missing); exit if their settings differ from ``settings``."""
    if not path.exists():
        return {"settings": settings, "rows": {}}
    found = json.loads(path.read_text())
    if found["settings"] != settings:
        raise SystemExit(f"{path} was made with {found['settings']}, not {settings}: choose another --output")
    return found


def cells(name, rows):
    """Return the cells of the table row ``name``, averaged over ``rows``, one per seed."""

    def average(measure):
        return mean(row[measure] for row in rows)

    def per_cent(measure):
        return f"{100 * average(measure):.1f} ({100 * average(measure + '_retrained'):.1f})"

    spread = 100 * stdev(row["accuracy"] for row in rows) if len(rows) > 1 else 0.0
    by_request = [100 * mean(moment) for moment in zip(*(row["difference"] for row in rows), strict=True)]
    claim = rows[0]["claim"] + (", bits" if all(row["same_bits"] for row in rows) else "")
    return [
        f"{100 * average('accuracy'):.2f} ± {spread:.2f} ({100 * average('accuracy_retrained'):.2f})",
        " / ".join(f"{value:+.2f}" for value in by_request),
        jsd_beside_floors(*(average(measure) for measure in ("jsd", "jsd_order", "jsd_seed"))),
        per_cent("old_head"),
        per_cent("few_shot"),
        f"{average('membership'):.3f} ({average('membership_retrained'):.3f})",
        f"{average('seconds'):.3f} ({average('seconds_retrain'):.1f})",
        f"{average('trajectory') / 1024:.0f}",
        "–" if "obey" in ROWS[name] else claim,
    ]


def jsd_beside_floors(value, order, seed):
    ratio = floor_ratio(value, order)
    times = "" if ratio is None else f", {two_digits(ratio)} ×"
    return f"{distance_in_words(value)}{times} ({distance_in_words(order)}, {distance_in_words(seed)})"


def table(by_row, settings, seeds):
    lines = [
        "# What each part of an unlearning does",
        "",
        f"Permuted MNIST, {N_TASKS} tasks of {settings['n_train']} training images; requests {REQUESTS}, deadline",
        f"{DEADLINE}; MLP 784-256-100-64, Adam 1e-3, {settings['epochs']} epochs, batch 128;",
        f"masks under a regulariser of weight .5, trained heads. Mean of seeds {seeds}.",
        "In brackets: the retrained model.",
        "",
        *(f"* {name}: {meaning}" for name, meaning in COLUMNS.items()),
        "",
    ]
    lines += ["| row | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(cells(name, rows)) + " |" for name, rows in by_row.items()]
    return "\n".join(lines) + "\n"


def figure(by_row):
    """Plot accuracy difference, JSD with its noise floor, and accuracy of old heads: a bar per row, a dot per seed."""
    picture = Figure(figsize=(10, 0.3 * len(by_row) + 1.4), layout="constrained")
    panels = picture.subplots(1, 3, sharey=True)
    names = list(by_row)
    colours = ["tab:orange" if name.startswith("adahat") else "tab:blue" for name in names]
    measured = [
        ("accuracy of remaining tasks\nminus never forgot (points)", lambda row: 100 * row["difference"][-1], None),
        (
            "JSD from the retrained model (bits)\nblack: another order's",
            lambda row: row["jsd"],
            lambda row: row["jsd_order"],
        ),
        (
            "old head on forgotten tasks (%)\nblack: on the retrained model",
            lambda row: 100 * row["old_head"],
            lambda row: 100 * row["old_head_retrained"],
        ),
    ]
    for ax, (title, value, floor) in zip(panels, measured, strict=True):
        ax.barh(names, [mean(map(value, rows)) for rows in by_row.values()], color=colours, alpha=0.75)
        for place, rows in enumerate(by_row.values()):
            ax.plot([value(row) for row in rows], [place] * len(rows), ".", color="0.25", markersize=4)
            if floor is not None:
                ax.plot([mean(map(floor, rows))] * 2, [place - 0.42, place + 0.42], color="black", linewidth=1.8)
        ax.set_xlabel(title, fontsize=9)
        ax.grid(axis="x", alpha=0.3)
        ax.axvline(0, color="0.4", linewidth=0.8)
    panels[0].set_ylim(len(names) - 0.4, -0.6)
    panels[0].tick_params(axis="y", labelsize=8)
    return picture


def report(options, settings):
    files = sorted(options.output.parent.glob(f"{options.output.name}_seed*.json"))
    by_seed = {int(path.stem.rpartition("seed")[2]): load(path, settings)["rows"] for path in files}
    by_row = {name: [rows[name] for rows in by_seed.values() if name in rows] for name in ROWS}
    by_row = {name: rows for name, rows in by_row.items() if rows}
    options.output.with_suffix(".md").write_text(table(by_row, settings, sorted(by_seed)))
    figure(by_row).savefig(options.output.with_suffix(".png"), dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", default=None, help="data root (or the variable AMNESIA_DATA)")
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--n-train", type=int, default=12000)
    parser.add_argument("--n-test", type=int, default=5000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("experiments/results/ablation"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    settings = {name: vars(options)[name] for name in ("n_train", "n_test", "epochs")}
    for seed in options.seeds if options.rows else ():
        laboratory, path = Laboratory(options, seed), path_of(options, seed)
        for name in options.rows:
            row = laboratory.run(**ROWS[name])
            print(name, seed, row, flush=True)
            known = load(path, settings)
            known["rows"][name] = row
            path.write_text(json.dumps(known, indent=1) + "\n")
    report(options, settings)


if __name__ == "__main__":
    main()
