"""`kerasmgpu bench`: how fast ranks train here, beside what could be reached."""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kerasmgpu.errors import InvalidArgumentError

if TYPE_CHECKING:
    from rich.table import Table

HELP = "measure how fast ranks train on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kerasmgpu bench`."""
    from kerasmgpu.perf.workloads import WORKLOADS

    add = parser.add_argument
    add("--model", choices=sorted(WORKLOADS), default="mnist_cnn", help="what to train")
    add(
        "--np",
        default=None,
        metavar="1,2",
        help="numbers of ranks; 1: a wrapped beside a plain model in one process "
        "(default: 1 and 2, where there are cores for it)",
    )
    add("--rounds", type=int, default=3, metavar="R", help="repetitions (default: 3)")
    add("--seconds", type=float, default=8.0, help="of each measurement (default: 8)")
    add("--json", type=Path, metavar="FILE", help="write a record with all numbers")


def main(args: argparse.Namespace) -> int:
    """Measures, round by round; prints tables."""
    from rich.console import Console

    from kerasmgpu.perf import record
    from kerasmgpu.perf.blocks import Blocks

    cores = len(os.sched_getaffinity(0))
    sizes = _sizes(args.np, cores)
    _check(args)
    console = Console()
    blocks = Blocks(args.model, args.seconds)
    raw: dict[str, Any] = {"load_of_others_percent": [], "rounds": []}
    with console.status("") as status:
        for number in range(args.rounds):
            taken: dict[str, Any] = {}
            raw["rounds"].append(taken)
            for size in sizes:
                plan = _plan(blocks, size, cores // size, number)
                for name, measure in plan:
                    status.update(
                        f"{args.model}, round {number + 1} of {args.rounds}, "
                        f"{size} process(es): {name}"
                    )
                    with record.load_of_others() as load:
                        taken[f"{size}: {name}"] = measure()
                    raw["load_of_others_percent"] += load
    results = summarize(raw["rounds"], sizes)
    for table in make_tables(args.model, cores, results):
        console.print(table)
    busy = max(raw["load_of_others_percent"])
    console.print(
        f"{args.rounds} round(s) of {args.seconds:g} s a measurement; medians, and the "
        f"lowest and highest round. Other programs took up to {busy:.0f} % of the "
        "processors meanwhile."
    )
    if busy > 10:
        console.print("[yellow]Measure again on a quiet machine.[/]")
    if args.json is not None:
        record.write_record(args.json, record.make_record(results, raw))
        console.print(f"record: {args.json}")
    return 0


def _plan(
    blocks: Any, size: int, share: int, number: int
) -> list[tuple[str, Callable[[], Any]]]:
    """What to measure for a number of ranks in a round, in an order that alternates."""
    if size == 1:
        return [("plain and wrapped", partial(blocks.pairs, bool(number % 2)))]
    plan: list[tuple[str, Callable[[], Any]]] = [
        ("alone", partial(blocks.independent, 1, share)),
        ("independent", partial(blocks.independent, size, share)),
        ("ranks", partial(blocks.ranks, size)),
    ]
    return plan[::-1] if number % 2 else plan


def _sizes(text: str | None, cores: int) -> list[int]:
    if text is None:
        return [1, 2] if cores > 1 else [1]
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1 or len(set(sizes)) < len(sizes):
        raise InvalidArgumentError(
            "Expected --np as different positive numbers, such as 1,2. Received: "
            f"--np {text}."
        )
    if max(sizes) > cores:
        raise InvalidArgumentError(
            f"Expected at most one rank a core: there are {cores} core(s). Received: "
            f"--np {text}."
        )
    return sizes


def _check(args: argparse.Namespace) -> None:
    if args.rounds < 1 or not args.seconds > 0:
        raise InvalidArgumentError(
            "Expected --rounds and --seconds to be positive. Received: --rounds "
            f"{args.rounds} --seconds {args.seconds:g}."
        )
    if args.json is not None and not os.access(args.json.absolute().parent, os.W_OK):
        raise InvalidArgumentError(
            f"Expected a FILE that can be written. Received: --json {args.json}."
        )


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

    alone, ceiling, ranks = map(total, ("alone", "independent", "ranks"))
    return {
        "alone_samples_per_second": alone,
        "ceiling_samples_per_second": ceiling,
        "ranks_samples_per_second": ranks,
        "ceiling_to_alone": ceiling / alone,
        "ranks_to_alone": ranks / alone,
        "ranks_to_ceiling": ranks / ceiling,
    }


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
    return tables


def _spread(values: Sequence[float], form: str) -> str:
    middle = statistics.median(values)
    if len(values) == 1:
        return f"{middle:{form}}"
    return f"{middle:{form}} ({min(values):{form}}-{max(values):{form}})"
