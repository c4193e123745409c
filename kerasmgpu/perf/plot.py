"""Plots of speed-up: what was measured, the ideal, and a model of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from kerasmgpu.errors import InvalidArgumentError


def check_can_plot(path: Path) -> None:
    """Raises before anything is measured where a plot could not be made."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InvalidArgumentError(
            "A plot needs matplotlib, which is not installed. Install it with "
            "`pip install matplotlib`."
        ) from None
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise InvalidArgumentError(
            "Expected a plot's file to end in .png, .svg or .pdf. Received: "
            f"{str(path)!r}."
        )


def plot_speedups(
    path: Path,
    title: str,
    measured: Mapping[str, Mapping[int, Sequence[float]]],
    lines: Mapping[str, Mapping[int, float]],
) -> None:
    """Writes a plot of speed-up against the number of processes.

    Args:
        path: where to, by its ending a PNG, SVG or PDF.
        title: above the plot; says what was measured, and how.
        measured: label → processes → the speed-up of each round, drawn as the median
            and the lowest and highest round.
        lines: label → processes → speed-up of a model.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 5))
    sizes = sorted(
        {n for points in (*measured.values(), *lines.values()) for n in points}
    )
    axes.plot(sizes, sizes, color="0.6", linestyle=":", label="ideal")
    for label, line in lines.items():
        axes.plot(list(line), list(line.values()), linestyle="--", label=label)
    for label, points in measured.items():
        middle = [statistics.median(values) for values in points.values()]
        below = [m - min(v) for m, v in zip(middle, points.values(), strict=True)]
        above = [max(v) - m for m, v in zip(middle, points.values(), strict=True)]
        axes.errorbar(
            list(points), middle, (below, above), fmt="o", capsize=4, label=label
        )
    if sizes[-1] > 16 * sizes[0]:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("processes")
    axes.set_ylabel("speed-up against one process")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
