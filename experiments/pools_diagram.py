"""Draw what ``isolation="pools"`` lets a task write and read, from the package's own layout: ``docs/pools.png``.

python experiments/pools_diagram.py
"""

from itertools import pairwise, product
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Circle

from avalanche_amnesia.isolation.pools import pool

SIZES = {"layer 1": 15, "layer 2": 10, "features": 10}
TASKS, PERMANENT, SHOWN = 5, 2, 3
COLOURS = ["tab:blue", "tab:purple", "tab:green", "tab:orange", "tab:brown"]
LABELS = [f"task {task}'s pool: closed to task {SHOWN}" for task in range(TASKS)]
LABELS[PERMANENT] = f"task {PERMANENT}'s pool, permanent:\nread by task {SHOWN}, never written"
LABELS[SHOWN] = f"task {SHOWN}'s pool:\nwritten and read"


def places():
    """Layer → slot → heights of its units, from the top."""
    members = [pool(list(SIZES.values()), TASKS, frozenset([slot])) for slot in range(TASKS)]
    start, found = 0, []
    for size in SIZES.values():
        of_layer = [own[start : start + size].nonzero()[:, 0].tolist() for own in members]
        found.append([[1 - (unit + 0.5) / size for unit in units] for units in of_layer])
        start += size
    return found


def draw():
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    ax = figure.subplots()
    layers = places()
    for (x, below), (_, above) in pairwise(enumerate(layers)):
        for source in (PERMANENT, SHOWN):
            for left, right in product(below[source], above[SHOWN]):
                ax.plot([x, x + 1], [left, right], color=COLOURS[source], linewidth=0.8, alpha=0.7, zorder=1)
    for x, (name, slots) in enumerate(zip(SIZES, layers, strict=True)):
        for slot, heights in enumerate(slots):
            alpha = 1 if slot in (PERMANENT, SHOWN) else 0.3
            for y in heights:
                ax.add_patch(Circle((x, y), 0.026, color=COLOURS[slot], alpha=alpha, zorder=2))
        ax.text(x, 1.06, name, ha="center")
    for slot in range(TASKS):
        y = sum(layers[-1][slot]) / len(layers[-1][slot])
        ax.text(2.12, y, LABELS[slot], va="center", color=COLOURS[slot], fontsize=9)
    ax.set(xlim=(-0.2, 3.3), ylim=(-0.03, 1.14))
    ax.axis("off")
    return figure


def main():
    draw().savefig(Path(__file__).parents[1] / "docs" / "pools.png", dpi=120)


if __name__ == "__main__":
    main()
