"""Draw accuracy against the bytes of a saved state, from the rows of the comparison.

    python -m experiments.comparison_figure      # writes experiments/results/comparison.png

Both axes are logarithmic. Markers of exact methods are filled, those of approximate methods hollow, and methods that
ignore requests have crosses. Each method is shown with fitted or with own heads: those that were better on held-out
images, because fitted heads harm strategies whose features change later.
"""

from itertools import chain
from statistics import mean

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from experiments.comparison import BY_CONSTRUCTION, FIRST, OUTPUT, STREAMS, with_better_heads
from experiments.methods import METHODS
from experiments.trials import Row, rows_of, rows_tested

FAMILIES = {
    "o": (
        *("DisjointSubnets", "CLPU-DER++", "Independent", "Independent, narrow"),
        *("SISA", "RanPAC", "Nearest class mean"),
    ),
    "s": ("AmnesiacHAT", "WSN", "PALL"),
    "D": ("Naive", "EWC", "LwF", "Replay", "DER++"),
    "X": ("HAT", "AdaHAT"),
}
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink")
FINE = (0.5, 1, 2, 3, 5, 7, 10, 15, 20, 25, 30, 40, 50, 60, 80)
COARSE = (0.01, 0.1, 1, 10, 50)
"""Errors, in per cent, at which the axis has ticks; ``COARSE`` if the methods differ by orders of magnitude."""


def draw(ax: Axes, rows: list[Row], title: str) -> dict[str, Artist]:
    """Draw all methods of one stream from its result rows; return method name → handle for the legend."""
    handles: dict[str, Artist] = {}
    for marker, methods in FAMILIES.items():
        for method, colour in zip(methods, COLOURS, strict=False):
            proven = [row for row in rows_tested(rows, method=method, fitted=True) if "bytes" in row]
            claims = set(chain.from_iterable(row.get("claims", []) for row in proven))
            if proven:
                size = mean(row["bytes"] for row in proven) / 2**20
                error = 100 * max(1e-4, 1 - mean(row["accuracy"] for row in with_better_heads(rows, method=method)))
                exact = claims <= BY_CONSTRUCTION if claims else marker == "X" or not METHODS[method].proven
                filled = colour if exact else "none"
                handles[method] = ax.scatter(
                    size, error, s=60, marker=marker, facecolors=filled, edgecolors=colour, linewidths=1.5
                )
    ax.set(xscale="log", yscale="log", title=title)
    ax.invert_yaxis()
    low, high = sorted(ax.get_ylim())
    ax.yaxis.set_major_locator(
        FixedLocator([error for error in (FINE if high < 30 * low else COARSE) if low <= error <= high])
    )
    ax.yaxis.set_major_formatter(FuncFormatter(lambda error, _: f"{100 - error:g}"))
    ax.xaxis.set_major_locator(FixedLocator([0.5, 1, 2, 5, 10, 20, 50, 100]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:g}"))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())
    ax.grid(color="0.92")
    ax.set_axisbelow(True)
    return handles


def main() -> None:
    """Draw one panel per stream, and write the figure to a PNG file."""
    rows = rows_of(OUTPUT)
    streams = [s for s in STREAMS if any("bytes" in row for row in rows_tested(rows, stream=s, method=FIRST))]
    columns = min(4, len(streams))
    lines = -(-len(streams) // columns)
    figure = Figure(figsize=(max(6.5, 3.0 * columns), 2.7 * lines + 0.9), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    handles: dict[str, Artist] = {}
    for ax, stream in zip(axes, streams, strict=False):
        handles |= draw(ax, [row for row in rows if row["stream"] == stream], stream)
    for ax in axes[len(streams) :]:
        ax.set_axis_off()
    for ax in axes[max(0, len(streams) - columns) : len(streams)]:  # the lowest panel of each column
        ax.set_xlabel("saved state, megabytes")
    for ax in axes[::columns]:
        ax.set_ylabel("accuracy, %")
    names = [method for method in METHODS if method in handles]
    figure.legend(
        [handles[n] for n in names],
        names,
        loc="outside lower center",
        ncols=5 if columns < 4 else 8,
        frameon=False,
        fontsize=9,
    )
    figure.savefig(OUTPUT.with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
