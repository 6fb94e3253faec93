"""Draw ``docs/idea.png``: three networks (learned, unlearned, retrained) that explain the idea of the package.

python -m experiments.idea_diagram
"""

from itertools import pairwise, product
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Wedge

TASKS = {0: "tab:blue", 1: "tab:orange", 2: "tab:green"}
FORGOTTEN = 1
# Layer → unit → tasks whose masks open it.
LAYERS = [
    [(0,), (0, 1), (1,), (1, 2), (2,), ()],
    [(0,), (0, 2), (1, 2), (1,), (2,)],
    [(0, 1), (0,), (1,), (1, 2)],
]
RETRAINED = [
    [(0,), (0, 2), (), (2,), (2,), ()],
    [(0,), (0, 2), (2,), (), (2,)],
    [(0,), (0,), (2,), (2,)],
]


def without(layers: list[list[tuple[int, ...]]], task: int) -> list[list[tuple[int, ...]]]:
    """Return a copy of ``layers`` in which no unit is used by ``task``."""
    return [[tuple(user for user in users if user != task) for users in layer] for layer in layers]


def draw_network(ax: Axes, layers: list[list[tuple[int, ...]]], title: str) -> None:
    """Draw units as discs in the colours of the tasks that use them, and lines between units of the same task."""
    places = [
        [(x, 0.5 + (unit - (len(layer) - 1) / 2) * -0.17) for unit in range(len(layer))]
        for x, layer in enumerate(layers)
    ]
    for (below, from_users), (above, to_users) in pairwise(zip(places, layers, strict=True)):
        for (start, here), (end, there) in product(
            zip(below, from_users, strict=True), zip(above, to_users, strict=True)
        ):
            for task in sorted(set(here) & set(there)):
                ax.plot(*zip(start, end, strict=True), color=TASKS[task], linewidth=1, alpha=0.5, zorder=1)
    for place, users in (
        (p, u) for row, layer in zip(places, layers, strict=True) for p, u in zip(row, layer, strict=True)
    ):
        share = 360 / max(1, len(users))
        for number, task in enumerate(users):
            ax.add_patch(
                Wedge(place, 0.07, 90 + number * share, 90 + (number + 1) * share, color=TASKS[task], zorder=2)
            )
        ax.add_patch(Wedge(place, 0.07, 0, 360, facecolor="none" if users else "white", edgecolor="0.35", zorder=3))
    ax.set(xlim=(-0.2, 2.2), ylim=(-0.02, 1.02), aspect=1, title=title)
    ax.set_axis_off()


def main() -> None:
    """Draw the three networks with a caption each, and write the figure."""
    figure = Figure(figsize=(9.6, 3.0), layout="constrained")
    learned, unlearned, retrained = figure.subplots(1, 3)
    draw_network(learned, LAYERS, "three tasks learned")
    draw_network(unlearned, without(LAYERS, FORGOTTEN), f"strategy.unlearn([{FORGOTTEN}])")
    draw_network(retrained, RETRAINED, f"retrained without task {FORGOTTEN}")
    texts = {
        learned: "masks say which units a task uses;\nwhat it changed is recorded",
        unlearned: "its update, mask and head are gone;\nwhite units are free again",
        retrained: "the yardstick: equal to the bit,\nor a distance that is measured",
    }
    for ax, text in texts.items():
        ax.text(1, -0.08, text, ha="center", va="top", fontsize=10, color="0.2")
    names = [f"task {task}" for task in TASKS]
    handles = [Wedge((0, 0), 1, 0, 360, color=colour) for colour in TASKS.values()]
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
    figure.savefig(Path(__file__).parents[1] / "docs" / "idea.png", dpi=110)


if __name__ == "__main__":
    main()
