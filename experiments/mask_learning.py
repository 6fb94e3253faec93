"""Reproduce HAT-CL's Table 1: mini-batches until a mask is learned, with HAT and with HAT-CL (Duan, HAT-CL, 2023).

python -m experiments.mask_learning --nets 100 --seed 0 --output experiments/results/mask_learning
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from avalanche_amnesia.seeding import derive_seed
from avalanche_amnesia.training.hat_formulas import (
    Annealing,
    EmbeddingInit,
    SparsityRegulariser,
    embedding_gradient,
    initial_embedding,
    mask_scale,
    rescale_embedding_gradient_,
)

FEATURES, SAMPLES, TRAINED_ON, BATCH, S_MAX = 5, 1000, 800, 32, 100.0
WANTED = torch.tensor([1, 0, 1, 0, 1, 1], dtype=torch.bool)  # correct mask of the five inputs and the one output
BATCHES = TRAINED_ON // BATCH


@dataclass(frozen=True)
class Contender:
    """One way to learn masks: initial embeddings and annealing of the gate's scale; `paper`: the paper's result."""

    name: str
    init: EmbeddingInit
    annealing: Annealing
    paper: float | None = None


CONTENDERS = (
    Contender("HAT", "normal", "linear", 338.5),
    Contender("HAT-CL", "ones", "cosine", 25.0),
    Contender("ones alone", "ones", "linear"),
    Contender("cosine alone", "normal", "cosine"),
)


@dataclass(frozen=True)
class Outcome:
    """Number of mini-batches until the masks were correct, checked per epoch and per mini-batch; None: never."""

    by_epoch: int | None
    by_batch: int | None
    finite: bool = True


def data(seed: int) -> tuple[Tensor, Tensor]:
    """Return training data, ``(800, 5)`` and ``(800, 1)``, with y = x0 - 2·x2 + 3·x4, without 200 held-out samples."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "mask learning", "data"))
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    y = x[:, [0]] - 2 * x[:, [2]] + 3 * x[:, [4]]
    return x[:TRAINED_ON], y[:TRAINED_ON]


def learn_mask(
    contender: Contender, x: Tensor, y: Tensor, *, seed: int, net: int, weight: float, clamp: float, epochs: int
) -> Outcome:
    """Train one network until its binary masks equal ``WANTED`` at the end of an epoch, for at most ``epochs``."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "mask learning", "net", net))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "mask learning", "weights", net))
        linear = nn.Linear(FEATURES, 1)
    embedding = nn.Parameter(initial_embedding(contender.init, len(WANTED), generator, n_tasks=1))
    optimizer = torch.optim.SGD([*linear.parameters(), embedding], lr=0.01, momentum=0.9)
    # Eq. 5 without its quota: the sum of the layers' shares of open units. No unit is in use by an earlier task.
    regulariser = SparsityRegulariser(weight, "quota", torch.zeros_like(WANTED), (FEATURES, 1), math.inf)
    by_batch = None
    for epoch in range(epochs):
        order = torch.randperm(TRAINED_ON, generator=generator)
        for batch, rows in enumerate(order.split(BATCH)):
            scale = mask_scale(batch, BATCHES, S_MAX, contender.annealing)
            gate = torch.sigmoid(scale * embedding.detach()).requires_grad_()
            optimizer.zero_grad()
            output = linear(x[rows] * gate[:FEATURES]) * gate[FEATURES:]
            nn.functional.mse_loss(output, y[rows]).backward()
            with torch.no_grad():
                of_gate = gate.grad + regulariser.gradient(gate)
                embedding.grad = embedding_gradient(of_gate, gate, scale)
                rescale_embedding_gradient_(embedding.grad, embedding, scale, S_MAX, clamp)
                optimizer.step()
                embedding.clamp_(-6, 6)
            if not bool(embedding.isfinite().all()):
                return Outcome(None, by_batch, finite=False)
            if by_batch is None and torch.equal(embedding > 0, WANTED):
                by_batch = epoch * BATCHES + batch + 1
        if torch.equal(embedding > 0, WANTED):
            return Outcome((epoch + 1) * BATCHES, by_batch)
    return Outcome(None, by_batch)


def mean_and_error(values: Sequence[int | None]) -> tuple[float, float, int]:
    """Return mean and standard error of ``values`` without None (NaN if too few), and the number of None."""
    reached = torch.tensor([value for value in values if value is not None], dtype=torch.float64)
    mean = float(reached.mean()) if len(reached) else math.nan
    error = float(reached.std()) / math.sqrt(len(reached)) if len(reached) > 1 else math.nan
    return mean, error, len(values) - len(reached)


def run(*, nets: int, seed: int, weights: Sequence[float], clamp: float, epochs: int) -> list[dict]:
    """Train ``nets`` networks per contender and λ in ``weights``; return a row for each, with all networks' counts."""
    x, y = data(seed)
    rows = []
    for weight in weights:
        for contender in CONTENDERS:
            settings = {"seed": seed, "weight": weight, "clamp": clamp, "epochs": epochs}
            outcomes = [learn_mask(contender, x, y, net=net, **settings) for net in range(nets)]
            rows.append(
                {**asdict(contender), "weight": weight, "clamp": clamp}
                | {name: [getattr(outcome, name) for outcome in outcomes] for name in ("by_epoch", "by_batch")}
                | {"not_finite": sum(not outcome.finite for outcome in outcomes)}
            )
    return rows


def table(rows: list[dict]) -> str:
    """Return the rows as a Markdown table."""
    head = ["contender", "embeddings, annealing", "λ", "by epoch", "never", "by batch", "never", "paper"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        cells = [row["name"], f"{row['init']}, {row['annealing']}", f"{row['weight']:g}"]
        for counts in (row["by_epoch"], row["by_batch"]):
            mean, error, never = mean_and_error(counts)
            cells += [f"{mean:.1f} ± {error:.1f}", f"{never}/{len(counts)}"]
        cells.append("–" if row["paper"] is None else f"{row['paper']:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


NOTES = """\
# Batches until a mask is learned: HAT-CL's Table 1

Mean ± standard error over the nets that got there; *never*: the nets that did not within the cap of epochs. *By
epoch*: the masks are looked at when an epoch ends, so that a count is a multiple of 25; *by batch*: after every batch,
in the same runs. *Paper*: Duan, HAT-CL, 2023.

- The protocol names no λ: 0.75 is HAT's own and this package's default. λ is the factor of Eq. 5 without its quota, a
  sum over the two layers; HAT-CL's code takes their mean, so that its λ = 1 is 0.5 here.
- The "compensation 100" of the protocol is taken as the factor s_max = 100, with the published clamp c = 50. As a
  clamp, 100 can't be run: cosh(100) overflows float32 (`--clamp 100`: no net ever gets there).
- The last two contenders change one thing at a time.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weights", type=float, nargs="+", default=[0.1, 0.5, 0.75, 1.0], help="λ of the regulariser")
    parser.add_argument("--clamp", type=float, default=50.0, help="c of the compensation; cosh(100) is no float32")
    parser.add_argument("--epochs", type=int, default=200, help="a net that needs more has failed")
    parser.add_argument("--output", type=Path, default=None, help="written with the suffixes .json and .md")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    settings = {"nets": options.nets, "seed": options.seed, "clamp": options.clamp, "epochs": options.epochs}
    rows = run(weights=options.weights, **settings)
    text = table(rows)
    print(text)
    if any(row["not_finite"] for row in rows):
        print(f"{sum(row['not_finite'] for row in rows)} nets became infinite or NaN; they count as never")
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        document = json.dumps({**settings, "rows": rows}).replace('{"name"', '\n{"name"')
        options.output.with_suffix(".json").write_text(document + "\n")
        options.output.with_suffix(".md").write_text(f"{NOTES}\n{text}\n")


if __name__ == "__main__":
    main()
