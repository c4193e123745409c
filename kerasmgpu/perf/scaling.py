"""What `kerasmgpu bench` makes of its measurements: ratios, tables, a fit."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kerasmgpu.errors import InvalidArgumentError
from kerasmgpu.perf.model import (
    StepModel,
    fit_steps,
    left_out_errors,
    relative_residuals,
)

if TYPE_CHECKING:
    from rich.table import Table

MODES = ("weak", "strong")


def batch_sizes(
    mode: str, per_rank_batch_size: int, sizes: Sequence[int]
) -> dict[int, int]:
    """Numbers of processes → the batch size of each process.

    "weak": that of the workload, whatever their number. "strong": they share a batch
    of the workload's times the largest number.
    """
    if mode == "weak":
        return dict.fromkeys([1, *sizes], per_rank_batch_size)
    whole = per_rank_batch_size * max(sizes)
    for size in sizes:
        if whole % size:
            raise InvalidArgumentError(
                f"Expected numbers of ranks that divide the batch of {whole} rows. "
                f"Received: {size}."
            )
    return {size: whole // size for size in [1, *sizes]}


def summarize(
    rounds: Sequence[dict[str, Any]], sizes: Sequence[int]
) -> dict[str, dict[str, list[float]]]:
    """The figures of the table: each by round.

    Args:
        rounds: what each round measured.
        sizes: numbers of ranks.

    Returns:
        For each size, name of a figure → its value in each round. Ratios are taken
        within a round, where all was measured under like conditions.
    """
    results: dict[str, dict[str, list[float]]] = {}
    for size in sizes:
        figures: dict[str, list[float]] = {}
        for taken in rounds:
            for name, value in _figures(taken, size).items():
                figures.setdefault(name, []).append(value)
        results[str(size)] = figures
    return results


def _figures(taken: dict[str, Any], size: int) -> dict[str, float]:
    if size == 1:
        pairs = taken["1: plain and wrapped"]
        return {
            "plain_step_seconds": statistics.median(plain for plain, _ in pairs),
            "wrapped_step_seconds": statistics.median(wrapped for _, wrapped in pairs),
            "wrapped_to_plain": statistics.median(b / a for a, b in pairs),
        }

    def total(name: str) -> float:
        return sum(one["samples_per_second"] for one in taken[f"{size}: {name}"])

    def steps(name: str) -> list[float]:
        return [one["median_step_seconds"] for one in taken[f"{size}: {name}"]]

    alone, ceiling, ranks = map(total, ("alone", "independent", "ranks"))
    apart = statistics.mean(steps("independent"))
    return {
        "alone_step_seconds": statistics.mean(steps("alone")),
        "ceiling_step_seconds": apart,
        "ranks_step_seconds": statistics.mean(steps("ranks")),
        "exposed_seconds": statistics.mean(steps("ranks")) - apart,
        "slowest_seconds": max(steps("independent")) - apart,
        "peak_bytes": max(one["peak_bytes"] for one in taken[f"{size}: ranks"]),
        "alone_peak_bytes": taken[f"{size}: alone"][0]["peak_bytes"],
        **_epochs(taken, size),
        "alone_samples_per_second": alone,
        "ceiling_samples_per_second": ceiling,
        "ranks_samples_per_second": ranks,
        "ceiling_to_alone": ceiling / alone,
        "ranks_to_alone": ranks / alone,
        "ranks_to_ceiling": ranks / ceiling,
        "samples_per_second_of_a_rank": ranks / size,
        "efficiency": ranks / alone / size,
    }


def _epochs(taken: dict[str, Any], size: int) -> dict[str, float]:
    """Epochs to their steps, where whole epochs were measured."""
    found = {
        f"{name}_epoch_to_steps": taken[f"{size}: {name}"][0]["epoch_to_steps"]
        for name in ("alone", "ranks")
    }
    return {name: value for name, value in found.items() if value is not None}


def make_tables(
    model: str, cores: int, results: dict[str, dict[str, list[float]]]
) -> list[Table]:
    """The tables of `summarize`'s figures."""
    from rich.table import Table

    def table(title: str, *headings: str) -> Table:
        made = Table(title=f"{model}, {title}")
        for heading in headings:
            made.add_column(heading, justify="right")
        return made

    tables = []
    for size, figures in results.items():
        if size == "1":
            overheads = [100 * (ratio - 1) for ratio in figures["wrapped_to_plain"]]
            one = table("one process: ms a step", "plain", "wrapped", "overhead, %")
            one.add_row(
                _spread([1000 * t for t in figures["plain_step_seconds"]], ".2f"),
                _spread([1000 * t for t in figures["wrapped_step_seconds"]], ".2f"),
                _spread(overheads, ".2f"),
            )
            tables.append(one)
            continue
        each = f"{size} processes, {cores // int(size)} core(s) each"
        many = table(each, "", "samples/s", "against one", "against the ceiling")
        many.columns[0].justify = "left"
        for name, label in (
            ("alone", "one plain process"),
            ("ceiling", f"ceiling: {size} plain ones"),
            ("ranks", f"{size} ranks"),
        ):
            ratios = [
                _spread(figures[key], ".3f") if key in figures else ""
                for key in (f"{name}_to_alone", f"{name}_to_ceiling")
            ]
            rate = _spread(figures[f"{name}_samples_per_second"], ".0f")
            many.add_row(label, rate, *ratios)
        tables.append(many)
        tables.append(_steps_table(table(f"{size} ranks", "", "median"), figures))
    return tables


def _steps_table(table: Table, figures: dict[str, list[float]]) -> Table:
    table.columns[0].justify = "left"
    for label, name, factor, form in (
        ("samples/s of a rank", "samples_per_second_of_a_rank", 1, ".0f"),
        ("efficiency: against one, a rank", "efficiency", 1, ".3f"),
        ("step of one process, ms", "alone_step_seconds", 1e3, ".2f"),
        ("step without exchange, ms", "ceiling_step_seconds", 1e3, ".2f"),
        ("step of the ranks, ms", "ranks_step_seconds", 1e3, ".2f"),
        ("exposed exchange, ms", "exposed_seconds", 1e3, ".2f"),
        ("of it, slowest process, ms", "slowest_seconds", 1e3, ".2f"),
        ("an epoch to its steps", "ranks_epoch_to_steps", 1, ".3f"),
        ("memory of a rank, MB", "peak_bytes", 1e-6, ".0f"),
        ("memory of one process, MB", "alone_peak_bytes", 1e-6, ".0f"),
    ):
        if name in figures:
            values = [factor * value for value in figures[name]]
            table.add_row(label, _spread(values, form))
    return table


def fitted(results: dict[str, dict[str, list[float]]], mode: str) -> dict[str, Any]:
    """`describe_fit` of the median steps.

    Empty without a measurement of two ranks or more.
    """
    steps: dict[int, float] = {}
    for size, figures in results.items():
        if "ranks_step_seconds" in figures:
            steps.setdefault(1, statistics.median(figures["alone_step_seconds"]))
            steps[int(size)] = statistics.median(figures["ranks_step_seconds"])
    return describe_fit(steps, mode) if steps else {}


def describe_fit(step_seconds: Mapping[int, float], mode: str) -> dict[str, Any]:
    """A `StepModel` of measured steps, with how well it fits.

    Args:
        step_seconds: processes → seconds of a step; of one and of other numbers.
        mode: "weak" or "strong".

    Returns:
        "compute", "exchange", "each": its seconds. "residuals": processes → the error
        of the fit, of 1. "left_out": processes → the error where a fit does not see it.
    """
    model = fit_steps(step_seconds, mode)
    errors = relative_residuals(model, step_seconds)
    left_out = left_out_errors(step_seconds, mode)
    return {
        "compute": model.compute,
        "exchange": model.exchange,
        "each": model.each,
        "residuals": {str(size): error for size, error in errors.items()},
        "left_out": {str(size): error for size, error in left_out.items()},
    }


def model_of(fit: dict[str, Any], mode: str) -> StepModel:
    """The `StepModel` of what `fitted` returned."""
    return StepModel(fit["compute"], fit["exchange"], fit["each"], mode)


def fit_text(fit: dict[str, Any]) -> str:
    """What `fitted` found, in words."""
    residuals = max(abs(error) for error in fit["residuals"].values())
    text = (
        f"Fitted: a step is {1e3 * fit['compute']:.2f} ms of computing, "
        f"{1e3 * fit['exchange']:.2f} ms x 2(N-1)/N of sending and "
        f"{1e3 * fit['each']:.2f} ms for each further process; off by up to "
        f"{residuals:.1%}."
    )
    if fit["left_out"]:
        errors = ", ".join(f"N={n}: {e:+.1%}" for n, e in fit["left_out"].items())
        return f"{text} Fitted without one number, its error there: {errors}."
    return f"{text} Three numbers of processes are needed to leave one out."


def _spread(values: Sequence[float], form: str) -> str:
    middle = statistics.median(values)
    if len(values) == 1:
        return f"{middle:{form}}"
    return f"{middle:{form}} ({min(values):{form}}-{max(values):{form}})"
