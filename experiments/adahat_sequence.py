"""AdaHAT on the stream of its paper (twenty tasks of permuted MNIST, all images), with the metrics of the paper.

    python -m experiments.adahat_sequence --root DATA --seeds 1 2
    python -m experiments.adahat_sequence --root DATA --seeds 1 2 --authors     # where clarena 1.1.0 is installed

Adds results to ``experiments/results/adahat_sequence.json``, skips runs that it contains, and writes the table next to
it.
"""

import argparse
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean

import torch
from torch import nn
from torch.optim import Adam

from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.evaluation.capacity import network_capacity
from avalanche_amnesia.models import MaskedModel, MultiHeadModel
from avalanche_amnesia.seeding import derive_seed
from avalanche_amnesia.training import HAT, PAPER_ALPHA, AdaHATRule, HardAttention
from avalanche_amnesia.training.update_rules import AdjustmentRule, ConstantRule, RandomRule
from experiments.streams import STREAMS, accuracy_on
from experiments.trials import measured, rows_tested, spread

OUTPUT = Path("experiments/results/adahat_sequence.json")
STREAM = replace(STREAMS["permuted"], n_tasks=20, requests={})
N_CLASSES = 10
ON_GRADIENTS = {
    "HAT": AdjustmentRule(space="gradient"),
    "AdaHAT": AdaHATRule(PAPER_ALPHA, space="gradient"),
    "random rates": RandomRule(space="gradient"),
    "no protection": ConstantRule(1.0, space="gradient"),
}
"""Adjustment rules as in the authors' code. One Adam with one learning rate trains both weights and embeddings."""
AS_THEIRS = HardAttention(embedding_lr=STREAM.lr)
OURS = {f"{name}, on gradients": (AS_THEIRS, rule) for name, rule in ON_GRADIENTS.items()} | {
    "HAT, on updates": (AS_THEIRS, AdjustmentRule()),
    "AdaHAT, on updates": (AS_THEIRS, AdaHATRule(PAPER_ALPHA)),
    "HAT, our defaults": (HardAttention(), AdjustmentRule()),
    "AdaHAT, our defaults (α 1e-2)": (HardAttention(), AdaHATRule()),
    "AdaHAT, our defaults, α 1": (HardAttention(), AdaHATRule(1.0)),
}
AUTHORS = {"HAT, authors' code": "hat", "AdaHAT, authors' code": "adahat"}
JOINT = "all tasks at once"
NOTES = """# AdaHAT on twenty tasks of permuted MNIST

```bash
python -m experiments.adahat_sequence --root DATA --seeds 1 2
python -m experiments.adahat_sequence --root DATA --seeds 1 2 --authors     # where clarena 1.1.0 is installed
```

All 60,000 images a task, MLP 784-256-100-64, two epochs of mini-batches of 128, Adam 1e-3, λ .75, s_max 400, α 1e-6
unless a row says another one. Nothing is unlearned. The authors' code is CLArena 1.1.0, on the same images and
permutations, driven without Lightning. Means ± standard deviations over the seeds {seeds}.

* *AA*: average accuracy over the twenty tasks at the end, in per cent.
* *learned*: the same, each task right after its own training.
* *BWT*: backward transfer, the mean over all tasks but the last of the accuracy at the end minus *learned*, in points.
* *FR*: forgetting ratio, the mean of `(accuracy − 10 %) / (accuracy of {joint} − 10 %) − 1`, where the latter is of a
  network with twenty heads that is trained on all tasks at once, in as many steps; 0: nothing lost, −1: all.
* *capacity*: the mean adjustment rate of all parameters of the backbone, in per cent: of ours for a task to come, of
  theirs in the last step of the last task.

*On gradients*, *on updates*: what a rule scales. As the authors' code, these rows step the embeddings with the
network's learning rate. Adam divides a gradient by its own size: scaled by any constant rate it moves as far.
"""
COLUMNS = {"AA": "end", "learned": "learned", "BWT": "bwt", "FR": "fr", "capacity": "capacity"}


def ours(name, benchmark, seed):
    """Train our strategy ``name``; return each task's accuracy after its training and at the end, and free capacity."""
    masks, rule = OURS[name]
    torch.manual_seed(seed)
    model = MaskedModel(STREAM.network())
    optimizer = Adam(model.parameters(), lr=STREAM.lr)
    strategy = HAT(model=model, optimizer=optimizer, masks=masks, adjustment=rule, seed=seed, **STREAM.training)
    learned = []
    for trained, tested in zip(benchmark.train_stream, benchmark.test_stream, strict=True):
        strategy.train(trained)
        learned.append(accuracy_on(model, tested))
    return learned, [accuracy_on(model, tested) for tested in benchmark.test_stream], network_capacity(strategy)


def together(benchmark, seed):
    """Train all tasks jointly, with mini-batches of one task each; return values as :func:`ours`, capacity None."""
    torch.manual_seed(seed)
    model = MultiHeadModel(STREAM.network())
    for experience in benchmark.train_stream:
        model.adaptation(experience)
    optimizer = Adam(model.parameters(), lr=STREAM.lr)
    data, size = [task_data(experience) for experience in benchmark.train_stream], STREAM.training["train_mb_size"]
    for _ in range(STREAM.training["train_epochs"]):
        batches = [(task, index) for task, (x, _) in enumerate(data) for index in torch.randperm(len(x)).split(size)]
        for place in torch.randperm(len(batches)).tolist():
            task, index = batches[place]
            x, y = data[task]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[index], task), y[index]).backward()
            optimizer.step()
    end = [accuracy_on(model, tested) for tested in benchmark.test_stream]
    return end, end, None


def theirs(mode, benchmark, seed):
    """Train the authors' code with the adjustment ``mode``; return values as :func:`ours`."""
    from clarena.backbones import HATMaskMLP
    from clarena.cl_algorithms import HAT as AuthorsHAT
    from clarena.cl_algorithms import AdaHAT as AuthorsAdaHAT
    from clarena.heads import HeadsTIL

    from benchmarks.peer_clarena import Masks, driven

    torch.manual_seed(seed)
    layers = [layer for layer in STREAM.network().modules() if isinstance(layer, nn.Linear)]
    inputs, (*hidden, features) = layers[0].in_features, [layer.out_features for layer in layers]
    backbone = HATMaskMLP(input_dim=inputs, hidden_dims=hidden, output_dim=features, gate="sigmoid")
    backbone.masks = Masks()
    kind, options = (AuthorsAdaHAT, {"adjustment_intensity": PAPER_ALPHA}) if "adahat" in mode else (AuthorsHAT, {})
    options |= {"s_max": 400, "clamp_threshold": 50, "mask_sparsity_reg_factor": 0.75}
    method = driven(kind)(backbone, HeadsTIL(input_dim=features), adjustment_mode=mode, **options)

    @torch.no_grad()
    def accuracy(task):
        method.eval()
        x, y = task_data(benchmark.test_stream[task])
        logits = method.forward(x.flatten(1), stage="test", task_id=task + 1)[0]
        return float((logits.argmax(1) == y).float().mean())

    learned = []
    for task, experience in enumerate(benchmark.train_stream):
        x, y = task_data(experience)
        method.setup_task_id(task + 1, N_CLASSES, partial(Adam, lr=STREAM.lr), None)  # CLArena counts tasks from 1
        method.optimizer = method.configure_optimizers()["optimizer"]
        method.train()
        method.on_train_start()
        draw = torch.Generator().manual_seed(derive_seed(seed, "order", task))
        for _ in range(STREAM.training["train_epochs"]):
            parts = torch.randperm(len(x), generator=draw).split(STREAM.training["train_mb_size"])
            method.trainer.num_training_batches = len(parts)
            for number, index in enumerate(parts):
                step = method.training_step((x[index].flatten(1), y[index]), number)
        method.on_train_end()
        learned.append(accuracy(task))
    return learned, [accuracy(task) for task in range(STREAM.n_tasks)], float(step["capacity"])


def run(method, seed, root):
    benchmark = STREAM.benchmark(root, seed)
    began = time.process_time()
    if method == JOINT:
        learned, end, capacity = together(benchmark, seed)
    else:
        learned, end, capacity = (
            ours(method, benchmark, seed) if method in OURS else theirs(AUTHORS[method], benchmark, seed)
        )
    seconds = round(time.process_time() - began, 1)
    return {"learned": learned, "end": end, "capacity": capacity, "seconds": seconds}


def values(row, joint):
    """Return column name → number for a result ``row``; ``joint`` is the result of training all tasks jointly."""
    learned, end, chance = row["learned"], row["end"], 1 / N_CLASSES
    found = {"end": 100 * mean(end), "learned": 100 * mean(learned)}
    found["bwt"] = 100 * mean(b - a for a, b in zip(learned[:-1], end[:-1], strict=True))
    if joint is not None:
        found["fr"] = mean((a - chance) / (j - chance) for a, j in zip(end, joint["end"], strict=True)) - 1
    if row["capacity"] is not None:
        found["capacity"] = 100 * row["capacity"]
    return found


def table(rows):
    by_seed = {row["seed"]: row for row in rows if row["method"] == JOINT}
    seeds = ", ".join(str(seed) for seed in sorted({row["seed"] for row in rows}))
    lines = [NOTES.format(seeds=seeds, joint=JOINT), f"| method | {' | '.join(COLUMNS)} |", "|---" * 6 + "|"]
    for method in (JOINT, *OURS, *AUTHORS):
        mine = rows_tested(rows, method=method)
        found = [values(row, by_seed.get(row["seed"])) for row in mine]
        cells = []
        for name in COLUMNS.values():
            of_seeds = [each[name] for each in found if name in each]
            digits = 3 if name == "fr" else 1
            cells.append(spread(of_seeds, digits) if of_seeds else "–")
        if mine:
            lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, required=True, help="data root")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--authors", action="store_true", help="the authors' code in place of ours")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in options.seeds:
        for method in AUTHORS if options.authors else (JOINT, *OURS):
            what = {"method": method, "seed": seed, "validation": False}
            measured(options.output, what, partial(run, method, seed, options.root), table)


if __name__ == "__main__":
    main()
