"""Compare methods on streams by one protocol: fitted heads, equally many trials of settings, the same seeds.

    python -m experiments.comparison --root DATA --validation 101       # held-out training images: six or twelve trials
    python -m experiments.comparison --root DATA --test 21 22 23         # test images, with each method's best settings
    python -m experiments.comparison --root DATA --test 24 25 --unproven                 # only accuracy, CPU and bytes
    python -m experiments.comparison --root DATA --validation 101 --test 21 22 23 --own-heads       # heads not fitted

Adds results to ``experiments/results/comparison.json``, skips runs that it contains, and writes the table next to it.
"""

import tempfile
import time
from collections import Counter
from dataclasses import asdict
from functools import partial
from itertools import chain, product
from math import isnan
from pathlib import Path
from statistics import mean

import torch
from avalanche.training.plugins import EvaluationPlugin

from avalanche_amnesia.benchmarks import with_unlearning
from avalanche_amnesia.contrib.metrics import FewShot, Relapse
from avalanche_amnesia.contrib.metrics.statistics import paired_test
from avalanche_amnesia.evaluation import References
from avalanche_amnesia.evaluation.accuracy_difference import AccuracyDifference
from avalanche_amnesia.evaluation.jsd import JSDivergence
from avalanche_amnesia.evaluation.resolution import distance_in_words
from avalanche_amnesia.evaluation.unlearned_accuracy import UnlearnedAccuracy
from avalanche_amnesia.training import UnlearningPlugin, save_state
from avalanche_amnesia.training.host.lookup import find_plugin
from experiments import streams
from experiments.methods import METHODS, NearestMean, Shards, make
from experiments.streams import GLYPHS, PERMUTED_FASHION, accuracy_on
from experiments.trials import (
    Settings,
    arguments,
    best,
    measured,
    rows_of,
    rows_tested,
    search,
    spread,
    value_of,
)

STREAMS = {"glyphs": GLYPHS} | streams.STREAMS | {"permuted fashion": PERMUTED_FASHION}
RATES, OF_STOCK = (1, 2, 4, 8), (("Adam", 3e-4), ("Adam", 1e-3), ("SGD", 3e-2), ("SGD", 1e-1))
"""Factors of the stream's learning rate for our strategies (Adam); optimizers and learning rates of Avalanche's own
strategies, which need smaller steps to forget less."""
OUTPUT = Path("experiments/results/comparison.json")
BETWEEN = 1.4
"""Factor from the best learning rate to a lower and a higher one, tried for methods that have no other setting."""

BY_CONSTRUCTION = {"exact", "conditional"}
"""Claims of exact methods; with a plugin of this script that fits heads, an exact claim becomes conditional."""


def benchmark_of(method, stream, seed, root, validation):
    """Return the benchmark of a stream with its requests; for CLPU-DER++, the tasks without a request are permanent."""
    setup = STREAMS[stream]
    benchmark = setup.benchmark(root, seed, validation)
    if method == "CLPU-DER++":
        stays = [e.task_label for e in benchmark.train_stream if e.task_label not in setup.requested]
        benchmark = with_unlearning(benchmark, permanent=stays)
    return benchmark


def rates_of(method, stream):
    """Return the pairs (optimizer, learning rate) to try for a method on a stream."""
    return [("Adam", rate * STREAMS[stream].lr) for rate in RATES] if METHODS[method].kind is not None else OF_STOCK


def remaining(stream, experiences):
    """Return the ``experiences`` whose tasks are never unlearned in the stream."""
    return [each for each in experiences if each.task_label not in STREAMS[stream].requested]


def remaining_accuracy(model, stream, benchmark):
    """Return the mean test accuracy of ``model`` on all tasks that are never unlearned in the stream."""
    return mean(map(partial(accuracy_on, model), remaining(stream, benchmark.test_stream)))


def trial(stream, method, seed, settings, root, validation, fitted):
    """Train one method with ``settings``; return accuracy on the remaining tasks, CPU seconds and, for some, bytes."""
    setup, how = STREAMS[stream], METHODS[method]
    benchmark = benchmark_of(method, stream, seed, root, validation)
    shards = [setup.benchmark(root, seed, validation, slice(n, None, how.shards)) for n in range(how.shards)]
    began, models = time.process_time(), []
    if how.kind is NearestMean:
        inputs = benchmark.train_stream[0].dataset[0][0].numel()
        models.append(NearestMean(remaining(stream, benchmark.train_stream), inputs, seed))
    else:
        for part in shards if how.shards > 1 else [benchmark]:
            strategy = make(method, setup, seed, part, settings, fitted)
            strategy.train(part.train_stream)
            models.append(strategy.model)
    seconds = round(time.process_time() - began, 1)
    model = Shards(models) if how.shards > 1 else models[0]
    kept = {} if how.proven else {"bytes": size_in_bytes(model), "network": size_in_bytes(setup.network())}
    return {"accuracy": remaining_accuracy(model, stream, benchmark), "seconds": seconds} | kept


def size_in_bytes(model):
    """Return the bytes of all tensors in a model's ``state_dict``."""
    return sum(value.nbytes for value in model.state_dict().values())


def proven(stream, method, seed, settings, root):
    """Train a method with fitted heads; return all measures of the tables, on test images, as one result row."""
    setup = STREAMS[stream]
    benchmark = benchmark_of(method, stream, seed, root, False)
    fresh = partial(make, method, setup, seed, benchmark, settings)
    references = References(fresh, benchmark)
    probes = {"linear": Relapse(benchmark, references), "few": FewShot(benchmark, references)}
    probes["old"] = UnlearnedAccuracy(benchmark, references)
    distance, difference = JSDivergence(references, "own", ("order",)), AccuracyDifference(references, ("heads",))
    obeys = METHODS[method].obeys
    strategy = fresh(evaluator=EvaluationPlugin(*([distance, difference, *probes.values()] if obeys else [])))
    main = strategy.model
    network = size_in_bytes(main)
    began = time.process_time()
    strategy.train(benchmark.train_stream)
    row = {"seconds": round(time.process_time() - began, 1), "network": network}
    row["accuracy"] = remaining_accuracy(main, stream, benchmark)
    with tempfile.TemporaryDirectory() as folder:
        save_state(strategy, Path(folder) / "state")
        row["bytes"] = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    if not obeys:
        return row
    records, requested = find_plugin(strategy, UnlearningPlugin).records, sorted(setup.requested)
    left = [task for task in range(setup.n_tasks) if task not in setup.requested]
    row |= {"milliseconds": 1e3 * mean(r.seconds for r in records), "claims": [r.claim for r in records]}
    strategy.eval(benchmark.test_stream)
    row["difference"] = {who: mean(by_task.values()) for who, by_task in difference.differences.items()}
    models = {"unlearned": main} | {name: references.reference(left, name) for name in ("same", "order")}

    def over_requested(measure, which):
        found = [measure.number(models[which], main, task, left) for task in requested]
        return None if None in found or isnan(sum(found)) else mean(found)  # a diverged training has no number

    row["jsd"] = {name: over_requested(distance, name) for name in ("unlearned", "order")}
    return row | {name: {which: over_requested(probe, which) for which in models} for name, probe in probes.items()}


NOTES = """`experiments/streams.py` defines the streams, networks, epochs and requests.

* **Heads.** When a task ends, a new head is fitted to its features, for every method. *Own heads* are those that a
  method trains by itself, where they differ.
* **Settings.** On a stream, every method has the same number of trials for each kind of head: twelve, or six ({six}). A
  trial trains with one setting and is scored on held-out training images (seed 101). Four trials have different
  learning rates (Avalanche's strategies: two optimizers, two rates each), and the middle value of the method's second
  setting. Two have the best of these rates, and a lower and a higher value of the
  second setting, or of the rate if there is no second setting. Of twelve trials, the others extend the tried range
  while the best trial is at its end, in steps that grow, and then divide the wider gap next to the best trial. The
  setting of the best trial is run on the test images.
* **Methods.** *Independent* trains one network per task. *Narrow*: the same with smaller networks; all that exist at
  one time are together as large as one network of the other methods. *SISA* trains three networks per task, each on a
  third of its samples. *RanPAC* and *nearest class mean* use 2,000 random ReLU features of the pixels, and have no
  setting to choose. CLPU-DER++, DisjointSubnets and the narrow networks know all requests of the stream in advance;
  *a share per task* knows only the number of tasks. HAT and AdaHAT ignore requests. *Exact*: every record
  claims `exact`, or `conditional` where a plugin of these scripts fits heads; or the method has no records, and keeps
  only sums or networks of single tasks.
* **Accuracy** in per cent: mean ± standard deviation over the seeds 21 to 25 ({five}; own heads, too). The learning
  rate that LwF chose on permuted 20 is so low that the features stay close to their random initial values. On some
  test seeds a model is at chance, or near: with own heads EWC on permuted fashion (22, 25); with both kinds CLPU-DER++
  on glyphs (24); with fitted heads EWC on split CIFAR-10 (22 to 24), and one seed each of EWC, Naive and LwF on split
  fashion.
* **Streams.** *Glyphs* (`experiments/glyphs.py`): 60 printed characters in 12 tasks; the fonts of the test images and
  of the training images belong to different families. *Omniglot*: the drawings of its two small sets, each once.
* **Missing.** SISA on split CIFAR-10; variants on glyphs, split CIFAR-10 and Omniglot; on the last two own heads of
  HAT, AdaHAT and PALL, and on split CIFAR-10 of WSN and both kinds of *Independent*; on Omniglot proofs, and most
  sizes; proofs of EWC and RanPAC on permuted, permuted 20 and
  split CIFAR-10, of Replay on permuted 20 and split CIFAR-10, of DER++ on permuted, of *a share per task* on permuted
  20, and of WSN with scores in 1 bit on permuted and permuted 20.
* **Machines.** Split CIFAR-10 ran on a GPU, except own heads, the tests of DisjointSubnets, EWC, Replay and RanPAC, and
  the seeds 24 and 25: do not compare the costs of the two groups. Other jobs ran at the same time as Omniglot, as the
  seeds 24 and 25 on split CIFAR-10, permuted and permuted 20, and, on all streams, as the trials after the sixth and
  the tests of settings that these found, as RanPAC on glyphs and both Fashion streams, and as own heads on glyphs
  and split CIFAR-10, and all of DisjointSubnets: these CPU seconds and milliseconds are up to 3.3 times too high."""
SHOWN = (
    *("DisjointSubnets", "Independent", "Independent, narrow", "SISA", "CLPU-DER++", "RanPAC", "Nearest class mean"),
    *("WSN", "AmnesiacHAT", "EWC", "Replay"),
)
HARDER = ("glyphs", "split cifar", "omniglot")
IN_SHORT = """Accuracy of the remaining tasks after the last task, with fitted or own heads: where both were run,
those that were better on held-out images. In brackets: the mean difference to DisjointSubnets over the same seeds, with
its 95 % interval; bold if the interval does not contain 0."""
FIRST = "DisjointSubnets"
PAIRED = """Mean difference in accuracy over the same seeds, in points, with its 95 % interval (Student's t); bold
if the interval does not contain 0. In the tables of settings, an asterisk marks an end of the tried range."""
COLUMNS = """* Means over the seeds 21 to 23; *accuracy*, *own heads*, SISA and nearest class mean: over all five.
* *Own heads*: accuracy with the method's own heads. A fitted head is outdated sooner where later tasks
  change the features, as in stock strategies.
* *AD*: accuracy difference to a model that ignored all requests, in points. *Control*: what that model gains when
  its heads are fitted again.
* *JSD*: Jensen-Shannon divergence to the retrained model, in bits. *Floor*: the same between the retrained model and
  one that was retrained with its data in another order.
* *Linear probe*, *few shots*, *old head*: accuracy on the unlearned tasks of a head fitted to all their samples, of a
  head fitted to five samples per class, and of the head that they had before; in points above the retrained model.
  *Order*: the same for the model retrained with its data in another order. A value is below 0 where units of an
  unlearned task are back at their initial values, which other tasks use in the retrained model.
* *Kept*: size of a saved state in MB. *Per task*: the part of it beyond the network, per remaining task.
* *CPU*: CPU seconds of the training. *Request*: milliseconds of one request, with its hashes; except
  for RanPAC also with copies of heads that metrics ask for."""


def with_better_heads(rows, **what):
    """Return the rows on test images, with fitted or with own heads: those that were better on held-out images."""
    tried = [row for row in rows if row["validation"] and what.items() <= row.items()]
    if not tried:  # the method has no settings to choose, or was not run
        return rows_tested(rows, **what)
    return rows_tested(rows, **what, fitted=max(tried, key=lambda row: row["accuracy"])["fitted"])


def at_an_end(chosen, tried, method):
    """Return True if the chosen learning rate or setting is the lowest or highest of all ``tried`` values."""
    if not method.chosen:
        return False
    for name in ("lr", *chosen.options):
        value = value_of(chosen, name)
        values = [value_of(each, name) for each in tried if each.optimizer == chosen.optimizer]
        could_be_higher = name == "lr" or value * method.setting[2] <= method.most
        if min(values) == value or (max(values) == value and could_be_higher):
            return True
    return False


def table(rows):
    fitted, own = ([row for row in rows_tested(rows) if row["fitted"] is kind] for kind in (True, False))
    streams = [stream for stream in STREAMS if rows_tested(rows, stream=stream)]

    def named(method):
        claims = set(chain.from_iterable(row.get("claims", []) for row in fitted if row["method"] == method))
        exact = claims <= BY_CONSTRUCTION if claims else not METHODS[method].proven
        return f"{method}, exact" if exact else method

    def across(title, found, cell, variant=False):
        methods = [name for name, how in METHODS.items() if how.variant is variant and rows_tested(found, method=name)]
        there = [
            stream for stream in streams if any(row["stream"] == stream for row in found if row["method"] in methods)
        ]
        yield from ("", f"## {title}", "", f"| method | {' | '.join(there)} |", "|---" * (len(there) + 1) + "|")
        for method in methods:
            cells = [cell(rows_tested(found, stream=stream, method=method)) for stream in there]
            yield f"| {named(method)} | {' | '.join(cells)} |"

    def accuracy(mine):
        return spread([100 * row["accuracy"] for row in mine]) if mine else "–"

    def beyond(mine, first):
        """Return as text: mean difference in accuracy to DisjointSubnets over equal seeds, in points, with interval."""
        by_seed = {row["seed"]: row["accuracy"] for row in first}
        pairs = [(100 * row["accuracy"], 100 * by_seed[row["seed"]]) for row in mine if row["seed"] in by_seed]
        if not pairs:
            return "–"
        test = paired_test(*zip(*pairs, strict=True))
        if test.interval is None:
            return f"{test.mean_difference:+.1f}".replace("-", "−")
        told = f"{test.mean_difference:+.1f} ({test.interval[0]:+.1f} to {test.interval[1]:+.1f})".replace("-", "−")
        return f"**{told}**" if test.interval[0] * test.interval[1] > 0 else told

    def beside(mine):
        """Return the difference to DisjointSubnets with fitted heads as text; see :func:`beyond`."""
        return beyond(mine, rows_tested(fitted, method=FIRST, stream=mine[0]["stream"])) if mine else "–"

    def in_short(method, stream):
        """Return as text: accuracy, and difference to DisjointSubnets, each method with its better heads."""
        mine, first = (with_better_heads(rows, stream=stream, method=name) for name in (method, FIRST))
        if not mine or not first or method == FIRST:
            return accuracy(mine)
        return f"{accuracy(mine)}; {beyond(mine, first)}"

    def settings(mine):
        if not mine:
            return "–"
        chosen, what = Settings(**mine[0]["settings"]), {name: mine[0][name] for name in ("stream", "method", "fitted")}
        tried = [Settings(**row["settings"]) for row in rows if row["validation"] and what.items() <= row.items()]
        return f"{chosen}{' *' if at_an_end(chosen, tried, METHODS[what['method']]) else ''}"

    by_method = {stream: Counter(row["method"] for row in fitted if row["stream"] == stream) for stream in streams}
    five = ", ".join(stream for stream, found in by_method.items() if found and min(found.values()) == 5)
    six = ", ".join(stream for stream in streams if STREAMS[stream].trials == 6)
    lines = ["# Methods by one protocol", "", NOTES.format(five=five, six=six)]
    digits = [stream for stream in streams if stream not in HARDER]
    for title, shown in (("In short", HARDER), ("In short, digits and clothes", digits)):
        shown = [stream for stream in shown if stream in streams]
        lines += ["", f"## {title}", "", f"| method | {' | '.join(shown)} |", "|---" * (len(shown) + 1) + "|"]
        for method in SHOWN:
            cells = [in_short(method, stream) for stream in shown]
            if set(cells) != {"–"}:
                lines.append(f"| {named(method)} | {' | '.join(cells)} |")
    lines += ["", IN_SHORT]
    lines += across("Tasks that remain, at the end", fitted, accuracy)
    lines += across(f"Points above {FIRST}", fitted, beside)
    lines += ["", PAIRED]
    lines += across("The same with own heads", own, accuracy)
    lines += across("Variants of them, with fitted heads", fitted, accuracy, variant=True)
    lines += across("Settings", fitted, settings)
    lines += across("Settings for own heads", own, settings)
    lines += ["", "## How well they forget, and what it costs", "", COLUMNS]
    head = "| method | accuracy | own heads | AD, control | JSD, floor | linear probe, order | few shots, order |"
    more = "old head, order | kept | per task | CPU | request |"
    for stream in streams:
        mine = [row for row in fitted if row["stream"] == stream and "bytes" in row]
        if not rows_tested(mine, method=FIRST):
            continue  # it was run without proofs
        lines += ["", f"### {stream.capitalize()}", "", f"{head} {more}", "|---" * 12 + "|"]
        for method in METHODS:
            of_method = rows_tested(mine, method=method)
            if of_method:
                alone = accuracy(rows_tested(own, stream=stream, method=method))
                cells = [accuracy(rows_tested(fitted, stream=stream, method=method)), alone]
                cells += columns(of_method, STREAMS[stream])
                lines.append(f"| {named(method)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def columns(rows, stream):
    """Return the table cells on forgetting and costs of one method on one stream, as means over ``rows``."""
    left = stream.n_tasks - len(stream.requested)
    kept = [mean(row["bytes"] for row in rows), mean(row["bytes"] - row["network"] for row in rows) / left]
    cost = [*(f"{size / 2**20:.2f}" for size in kept), f"{mean(row['seconds'] for row in rows):.0f}"]
    if "difference" not in rows[0]:
        return ["–"] * 5 + cost + ["–"]

    def points(read):
        return f"{100 * mean(map(read, rows)):+.1f}".replace("-0.0", "+0.0")

    cells = [", ".join(points(lambda row, who=who: row["difference"][who]) for who in ("main", "heads"))]
    names = ("jsd", "linear", "few", "old")
    read = {name: all(None not in row[name].values() for row in rows) for name in names}
    floors = (mean(row["jsd"][which] for row in rows) for which in ("unlearned", "order"))
    cells.append(", ".join(map(distance_in_words, floors)) if read["jsd"] else "–")
    for name in names[1:]:
        gaps = (lambda row, w=which, n=name: row[n][w] - row[n]["same"] for which in ("unlearned", "order"))
        cells.append(", ".join(map(points, gaps)) if read[name] else "–")
    return [*cells, *cost, f"{mean(row['milliseconds'] for row in rows):.1f}"]


def main():
    parser = arguments(__doc__)
    parser.add_argument(
        "--own-heads", action="store_true", help="all of it with the heads that methods have by themselves"
    )
    parser.add_argument("--unproven", action="store_true", help="accuracy, CPU seconds and bytes alone")
    parser.add_argument("--streams", nargs="+", choices=STREAMS, default=list(STREAMS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for stream, method in product(options.streams, options.methods):
        if options.own_heads and not METHODS[method].has_own_heads:
            continue
        what = {"stream": stream, "method": method, "fitted": not options.own_heads}

        how, nothing = METHODS[method], Settings("", 0.0)

        def run(seed, settings, validation, what=what, how=how):
            row = what | {"seed": seed, "validation": validation, "settings": asdict(settings)}
            given = {"stream": what["stream"], "method": what["method"], "seed": seed, "settings": settings}
            made = partial(proven, **given, root=options.root)
            if validation or options.own_heads or options.unproven or not how.proven:
                made = partial(trial, **given, root=options.root, validation=validation, fitted=what["fitted"])
            return measured(options.output, row, made, table)["accuracy"]

        if options.validation and how.chosen:

            def measure(settings, run=run):
                return mean(run(seed, settings, True) for seed in options.validation)

            search(rates_of(method, stream), how.setting, BETWEEN, measure, STREAMS[stream].trials, how.most)
        for seed in options.test:
            chosen = best(rows_of(options.output), "settings", **what) if how.chosen else asdict(nothing)
            if chosen is None:
                parser.error(f"no settings of {method} on {stream!r} were tried: --validation SEED does it")
            run(seed, Settings(**chosen), False)


if __name__ == "__main__":
    main()
