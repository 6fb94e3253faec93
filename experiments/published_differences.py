"""Measure each difference between AmnesiacHAT's paper and its authors' code, by switching it on in our implementation.

    python -m experiments.published_differences --root DATA --seeds 1 2 3 4 5
    python -m experiments.published_differences --root DATA --seeds 1 2 3 4 5 --export TASKS     # for clarena_run.py

Runs the stream of ``experiments.published`` with 20,000 training images. Adds a file per seed to
``experiments/results/published/``, and writes ``experiments/results/published_differences.md`` from all files there,
including those that ``experiments/clarena_run.py`` wrote for the authors' code. With ``--export``, it only writes
images, sample orders and initial weights for that script.
"""

import argparse
import copy
import json
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any
from unittest import mock

import torch
from avalanche.benchmarks import CLScenario
from torch import Tensor, nn
from torch.optim import Adam

from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.contrib.baselines.dark_replay import DarkReplayPlugin, Samples, TaskMemory
from avalanche_amnesia.contrib.repair import RepairPlugin
from avalanche_amnesia.contrib.shadows.shadow import entries_in_use
from avalanche_amnesia.models import MaskedModel
from avalanche_amnesia.models.multi_head import backbone_entries
from avalanche_amnesia.seeding import derive_seed, seed_all
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training import PAPER_ALPHA, AdaHATRule, AmnesiacHAT, HardAttention
from avalanche_amnesia.training.plugins.in_memory_loader import TensorBatches
from avalanche_amnesia.training.task_in_training import TaskSnapshot
from avalanche_amnesia.trajectory.removal import Removal
from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unit_graph.backbones import evaluation_mode
from experiments.published_copies import PublishedCopies, Scope
from experiments.streams import STREAMS, accuracy_on

OUTPUT = Path("experiments/results/published")
STREAM = STREAMS["permuted"]
MEMORY = 500
BUILD: Mapping[str, Any] = {
    "start": "fresh",
    "scope": "unit",
    "embedding_lr": 0.05,
    "space": "update",
    "replay": False,
    "repair": 0,
    "commit": True,
    "alias": False,
    "momentum": False,
}
"""Settings of the published method, as in the paper's text."""
SWITCHES: Mapping[str, Mapping[str, Any]] = {
    "copies start at the state before the task": {"start": "before"},
    "copies stand in for the units of the task's own mask": {"scope": "own_unit"},
    "embeddings at the network's learning rate, 1e-3": {"embedding_lr": 1e-3},
    "α scales gradients": {"space": "gradient"},
    "nothing outside a mask returns at a task's end": {"commit": False},
    "DER++ replay in every step": {"replay": True},
    "50 steps of joint repair in an unlearning": {"repair": 50},
    "the forgotten task's update of its head goes off the newest head": {"alias": True},
    "that repair goes on with the last task's optimizer": {"repair": 50, "momentum": True},
}
ALL = {name: value for switch in SWITCHES.values() for name, value in switch.items()}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "our build of the published form": {},
    "+ all nine": ALL,
    "+ all but the last two": {**ALL, "alias": False, "momentum": False},
    "+ all but the repair": {**ALL, "repair": 0},
    **{f"+ {name}": switch for name, switch in SWITCHES.items()},
}
OF_TRAINING = ("embedding_lr", "space", "replay", "commit")
"""Switches that affect the model that unlearns nothing and has no copies."""


class AuthorsMemory(TaskMemory):
    """Memory of 500 samples of all tasks, with the logits of the step that drew each sample; never updated."""

    def __init__(self, seed: int) -> None:
        super().__init__(MEMORY, seed)

    def store(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing at a task's end: :class:`AuthorsReplay` draws the samples during training."""

    def refresh_logits(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the stored logits stay unchanged."""


class AuthorsReplay(DarkReplayPlugin):
    """Plugin that fills an :class:`AuthorsMemory` while training and, if ``replays``, adds DER++'s loss."""

    def __init__(self, seed: int, *, replays: bool) -> None:
        super().__init__(seed=seed)
        self.memory = AuthorsMemory(seed)
        self.replays = replays
        self._drawn: list[tuple[Tensor, Tensor, Tensor]] = []
        self._seen = 0

    def before_backward(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before the backward pass: add the loss on stored samples, and draw samples from the mini-batch."""
        if self.replays:
            super().before_backward(strategy, **kwargs)
        for sample in zip(strategy.mb_x, strategy.mb_y, strategy.mb_output.detach(), strict=True):
            self._seen += 1
            slot = len(self._drawn) if self._seen <= MEMORY else int(torch.randint(self._seen, ()))
            if slot < MEMORY:
                self._drawn[slot : slot + 1] = [sample]

    def after_training_exp(self, strategy: Strategy, **kwargs: Any) -> None:
        """After a task's training: store the task's samples; reduce every task to the same number of samples."""
        task = int(strategy.experience.task_label)
        x, y, logits = map(torch.stack, zip(*self._drawn, strict=True))
        samples = Samples(x, y, logits, frozenset({task}))
        quota = MEMORY // (len(self.memory.samples) + 1)
        self.memory.samples = {
            t: held.select(torch.arange(min(quota, len(held))))
            for t, held in {**self.memory.samples, task: samples}.items()
        }
        self._drawn, self._seen = [], 0


class AuthorsRepair(RepairPlugin):
    """Repair that trains only entries in the unlearned tasks' masks, towards the logits in an :class:`AuthorsMemory`.

    With ``momentum``, it continues with the optimizer state of the last training, whose momentum changes every weight
    for a few steps.
    """

    def __init__(self, memory: TaskMemory, seed: int, steps: int, *, momentum: bool) -> None:
        super().__init__(steps=steps, batch_size=64, labels=0.0, seed=seed)
        self.memory, self.momentum = memory, momentum
        self._used: dict[int, dict[str, Tensor]] = {}
        self._state: dict[str, dict[str, Tensor]] = {}

    def after_training_exp(self, strategy: Strategy, **kwargs: Any) -> None:
        """After a task's training: store the entries that the task uses, and copy the optimizer's state."""
        task, state = int(strategy.experience.task_label), strategy.optimizer.state
        self._used[task] = entries_in_use(strategy.model, task)
        named = backbone_entries(dict(strategy.model.named_parameters()))
        self._state = {name: copy.deepcopy(state[parameter]) for name, parameter in named.items() if parameter in state}

    def repair(self, model: Any, optimizer: Any, tasks: Any, compensated: Any, free: Mapping[str, Tensor]) -> int:
        """Train ``tasks`` on stored samples, at entries in the masks of the unlearned tasks; return the step count."""
        gone = [self._used.pop(task) for task in [*self._used] if task not in model.masked_tasks]
        inside = {name: torch.stack([used[name] for used in gone]).any(0) for name in gone[0]}
        if not self.momentum:
            free = {name: where & inside[name.removeprefix("backbone.")] for name, where in free.items()}
            return super().repair(model, optimizer, tasks, compensated, free)
        parameters = dict(model.backbone.named_parameters())
        heads = [p for task in tasks for p in model.head(task).parameters()]
        going_on = Adam([*parameters.values(), *heads], lr=STREAM.lr)
        going_on.state.update({parameters[name]: moments for name, moments in self._state.items()})
        held = {task: self.memory.samples[task] for task in tasks}
        places = [(task, at) for task, samples in held.items() for at in range(len(samples))]
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "repair", *tasks))
        size = STREAM.training["train_mb_size"]
        with evaluation_mode(model), torch.enable_grad():
            for _ in range(self.steps):
                drawn: dict[int, list[int]] = {}
                for place in torch.randint(len(places), (size,), generator=generator).tolist():
                    drawn.setdefault(places[place][0], []).append(places[place][1])
                parts = [(task, held[task].select(torch.tensor(index))) for task, index in drawn.items()]
                errors = [(model(part.x, task) - part.logits).square() for task, part in parts]
                (0.5 * torch.cat(errors).mean()).backward()
                for name, parameter in parameters.items():
                    parameter.grad.mul_(inside[name])
                going_on.step()
                going_on.zero_grad()
        return self.steps


class AuthorsCopies(PublishedCopies):
    """Copies as in the authors' code: their values replace entries completely, also the updates of later tasks.

    Outside their units, copies use the current weights, which include the earlier task's update. ``alias`` reproduces
    an error of the authors' code: a task's update refers to "the current head" by name, which is another task's head
    when the task is unlearned, so the unlearned task's update is subtracted from the newest head.
    """

    def __init__(self, begin_at: str, scope: Scope, seed: int, *, alias: bool) -> None:
        super().__init__(scope=scope, seed=seed)
        self.begin_at, self.alias = begin_at, alias
        self._head: dict[int, list[Tensor]] = {}

    def _initial_values(self, model: Any, trajectory: Any, task: int, other: int, values: Any) -> dict[str, Tensor]:
        if self.begin_at == "before":
            return backbone_entries(trajectory.values_before(other, values))
        return super()._initial_values(model, trajectory, task, other, values)

    def begin(self, strategy: Strategy, task: int, unlearnable: Collection[int]) -> None:
        """Before a task's training: create the copies, and copy the initial head of ``task``."""
        super().begin(strategy, task, unlearnable)
        for shadow in () if self._now is None else self._now.shadows.values():
            shadow.offset.clear()
        self._head[task] = [p.detach().clone() for p in strategy.model.head(task).parameters()]

    def prepare(self, strategy: Strategy, task: int, unlearnable: Collection[int]) -> None:
        """After a task's training: store what the copies learned, and the update of the task's head."""
        super().prepare(strategy, task, unlearnable)
        ends = strategy.model.head(task).parameters()
        self._head[task] = [end.detach() - start for end, start in zip(ends, self._head[task], strict=True)]

    def compensate(self, model: Any, gone: Collection[int], removal: Removal, change: Transaction) -> list[str]:
        """Write the copies' values into the model and, with ``alias``, subtract head updates from the newest head."""
        newest = max(self._head)
        for task in gone if self.alias and newest not in gone else ():
            for parameter, update in zip(model.head(newest).parameters(), self._head[task], strict=True):
                change.write(parameter.data, parameter.data - update)
        return super().compensate(model, gone, removal, change)


def benchmark_of(root: Path, seed: int, n_train: int | None) -> CLScenario:
    """Return the benchmark with its requests, on ``n_train`` of its training images (None: all)."""
    return replace(STREAM, n_train=n_train).benchmark(root, seed)


def options_of(build: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return the arguments of an :class:`AmnesiacHAT` for the switches in ``build``."""
    copies = AuthorsCopies(build["start"], build["scope"], seed, alias=build["alias"])
    replay = AuthorsReplay(seed, replays=build["replay"])
    repair = (
        AuthorsRepair(replay.memory, seed, build["repair"], momentum=build["momentum"]) if build["repair"] else None
    )
    return {
        "masks": HardAttention(embedding_lr=build["embedding_lr"]),
        "adjustment": AdaHATRule(alpha=PAPER_ALPHA, space=build["space"]),
        "compensation": copies,
        "repair": repair,
        "plugins": [replay] if build["replay"] or build["repair"] else [],
    }


def kept_by(build: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Return a context for trainings; with the switch ``commit`` off, entries outside masks keep their changes."""
    # The authors' code records all changes, also those that soft gates and replay made outside the task's mask.
    return nullcontext() if build["commit"] else mock.patch.object(TaskSnapshot, "commit")


def trained(build: Mapping[str, Any], benchmark: CLScenario, seed: int, *, unlearns: bool) -> list[float]:
    """Train all tasks, with unlearning if ``unlearns``; return the test accuracies of the tasks without a request."""
    torch.manual_seed(seed)
    model = MaskedModel(STREAM.network())
    options = options_of(build, seed) | ({} if unlearns else {"compensation": "none"})
    optimizer = Adam(model.parameters(), lr=STREAM.lr)
    strategy = AmnesiacHAT(model=model, optimizer=optimizer, seed=seed, **options, **STREAM.training)
    with kept_by(build):
        for experience in benchmark.train_stream:
            strategy.train(experience)
    return [
        accuracy_on(strategy.model, experience)
        for experience in benchmark.test_stream
        if experience.task_label not in STREAM.requested
    ]


def full_benchmark(root: Path, seed: int, n_train: int | None) -> CLScenario:
    """Return the benchmark as :func:`benchmark_of`, but without requests."""
    return replace(STREAM, n_train=n_train, requests={}).benchmark(root, seed)


def run(variant: str, seed: int, root: Path, n_train: int | None, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one result row; reuse the full model's accuracies from ``rows`` if a variant trained the same."""
    started = time.process_time()
    build = {**BUILD, **VARIANTS[variant]}
    remaining = trained(build, benchmark_of(root, seed, n_train), seed, unlearns=True)
    alike = [row["full"] for row in rows if all(row["build"][name] == build[name] for name in OF_TRAINING)]
    full = alike[0] if alike else trained(build, full_benchmark(root, seed, n_train), seed, unlearns=False)
    return {
        "variant": variant,
        "seed": seed,
        "images": n_train,
        "build": build,
        "remaining": remaining,
        "full": full,
        "ad": mean(remaining) - mean(full),
        "seconds": round(time.process_time() - started, 1),
    }


NOTES = """# The published AmnesiacHAT: our build beside the authors' code

```bash
python -m experiments.published_differences --root DATA --seeds 1 2 3 4 5
```

Permuted MNIST, MLP 784-256-100-64, five tasks of two epochs, mini-batches of 128, Adam 1e-3; 20,000 training images
unless a row says more. Task 0 is unlearned after task 1, task 1 after task 3, task 4 after itself; tasks 2 and 3
remain. `experiments/clarena_run.py` runs the authors' code on the same images, the first epoch of a task in the same
order, from the same initial weights, with copies of every task and values of ours for options without a default there:
memory of 500 samples, weights .5 of logits and labels, 50 steps of joint repair.

* `task 2`, `task 3`, `remaining`: accuracy in per cent at the end, and the mean of both.
* `full`: the same mean of a model of the same settings that never unlearned, and trained no copies.
* `ad`: `remaining` minus `full`.

Means ± standard deviations over the seeds.
"""
THEIRS = {
    "authors' code": {"backups": True, "repair_steps": 50, "memory": MEMORY},
    "authors' code, without the repair": {"backups": True, "repair_steps": 0, "memory": MEMORY},
    "authors' code, without copies": {"backups": False, "repair_steps": 50, "memory": MEMORY},
    "authors' code, deletion alone": {"backups": False, "repair_steps": 0, "memory": MEMORY},
}
SHOWN = ("row", "seeds", "task 2", "task 3", "remaining", "full", "ad")


def table() -> str:
    """Return the Markdown page of all stored results, the authors' code first."""
    ours = _rows("differences_seed*.json")
    groups = {
        name + ("" if images == 20_000 else ", 60,000 images"): authors_rows(settings, images)
        for images in (60_000, 20_000)
        for name, settings in THEIRS.items()
    }
    groups |= {variant: [row for row in ours if row["variant"] == variant] for variant in VARIANTS}
    lines = [NOTES, f"| {' | '.join(SHOWN)} |", "|---" * len(SHOWN) + "|"]
    return "\n".join([*lines, *(_line(name, rows) for name, rows in groups.items() if rows)]) + "\n"


def authors_rows(settings: Mapping[str, Any], images: int) -> list[dict[str, Any]]:
    """Return the stored results of the authors' code with these settings and this number of training images."""
    return [
        row
        for row in _rows("clarena_seed*.json")
        if row["images"] == images and all(row["settings"][key] == value for key, value in settings.items())
    ]


def cell(values: Sequence[float], scale: float, signed: bool = False) -> str:
    """Return mean and, of several values, standard deviation of ``scale · values`` as text."""
    scaled = [scale * value for value in values]
    spread = f" ± {stdev(scaled):.2f}" if len(scaled) > 1 else ""
    return f"{mean(scaled):{'+' if signed else ''}.2f}{spread}"


def _rows(files: str) -> list[dict[str, Any]]:
    return [row for file in sorted(OUTPUT.glob(files)) for row in json.loads(file.read_text())]


def _line(name: str, rows: list[dict[str, Any]]) -> str:
    columns = [[row["remaining"][task] for row in rows] for task in (0, 1)]
    columns += [[mean(row[which]) for row in rows] for which in ("remaining", "full")]
    cells = [cell(values, 100) for values in columns] + [cell([row["ad"] for row in rows], 100, signed=True)]
    return f"| {name} | {len(rows)} | {' | '.join(cells)} |"


def export(root: Path, seed: int, n_train: int | None, file: Path) -> None:
    """Write a file with images, each task's pixel and sample orders, and the network's initial weights."""
    benchmark = benchmark_of(root, seed, n_train)
    (x, y), (test_x, test_y) = (task_data(stream[0]) for stream in (benchmark.train_stream, benchmark.test_stream))
    x, test_x, n_pixels = x.flatten(1), test_x.flatten(1), x[0].numel()
    pixels, orders = [torch.arange(n_pixels)], []
    for task in range(1, STREAM.n_tasks):
        generator = torch.Generator().manual_seed(derive_seed(seed, "permutation", task))
        pixels.append(torch.randperm(n_pixels, generator=generator))
    for task, order in enumerate(pixels):
        if not torch.equal(task_data(benchmark.train_stream[task])[0].flatten(1), x[:, order]):
            raise AssertionError(f"the pixels of task {task} are permuted in another way")
        seed_all(derive_seed(seed, "order", task))
        size = STREAM.training["train_mb_size"]
        batches = TensorBatches(torch.arange(len(y)), y, task, size, shuffle=True, drop_last=False)
        orders.append([torch.cat([x for x, *_ in batches]).int() for _ in range(STREAM.training["train_epochs"])])
    torch.manual_seed(seed)
    layers = [layer for layer in MaskedModel(STREAM.network()).backbone.modules() if isinstance(layer, nn.Linear)]
    data = {
        "seed": seed,
        "x": x,
        "y": y,
        "test_x": test_x,
        "test_y": test_y,
        "pixels": pixels,
        "orders": orders,
        "initial": [(layer.weight.detach().clone(), layer.bias.detach().clone()) for layer in layers],
        "widths": [n_pixels, *(layer.out_features for layer in layers)],
        "batch_size": STREAM.training["train_mb_size"],
        "lr": STREAM.lr,
        "requests": {after: list(tasks) for after, tasks in STREAM.requests.items()},
    }
    torch.save(data, file)


def main() -> None:
    """Run all chosen seeds and variants, or export the seeds' data."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, required=True, help="data root")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--images", type=int, default=20_000, help="training images")
    parser.add_argument("--export", type=Path, help="folder for the files of clarena_run.py")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in options.seeds:
        if options.export is not None:
            options.export.mkdir(parents=True, exist_ok=True)
            export(options.root, seed, options.images, options.export / f"seed{seed}.pt")
            continue
        file = OUTPUT / f"differences_seed{seed}.json"
        for variant in options.variants:
            rows = json.loads(file.read_text()) if file.exists() else []
            if any(row["variant"] == variant for row in rows):
                continue
            rows.append(run(variant, seed, options.root, options.images, rows))
            print({name: value for name, value in rows[-1].items() if name != "build"}, flush=True)
            file.write_text(json.dumps(rows, indent=1) + "\n")
            Path(f"{OUTPUT}_differences.md").write_text(table())


if __name__ == "__main__":
    main()
