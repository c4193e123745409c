"""`kerasmgpu predict`: how a measured model would scale on more processes."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "predict speed-up on more processes from a record of `kerasmgpu bench`"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kerasmgpu predict`."""
    add = parser.add_argument
    add("--record", type=Path, required=True, help="of `kerasmgpu bench --json`")
    add(
        "--bandwidth",
        required=True,
        metavar="25gbit",
        help="of each process's link, each way (bits: gbit, mbit; bytes: gb, mb)",
    )
    add("--latency", default="20us", help="of a message (default: 20us)")
    add("--np", default="8,64,512", metavar="8,64", help="numbers of processes")
    add("--plot", type=Path, metavar="FILE", help="draw them, up to 512 processes")


def main(args: argparse.Namespace) -> int:
    """Prints a table; draws a plot."""
    from rich.console import Console
    from rich.table import Table

    from kerasmgpu.perf import prediction
    from kerasmgpu.perf.model import parse_bandwidth, parse_seconds
    from kerasmgpu.perf.plot import check_can_plot, plot_speedups

    bandwidth, latency = parse_bandwidth(args.bandwidth), parse_seconds(args.latency)
    sizes = prediction.parse_sizes(args.np)
    if args.plot is not None:
        check_can_plot(args.plot)
    measured = prediction.read_record(args.record)
    title = (
        f"{measured.model}, predicted (not measured): links of {args.bandwidth}, "
        f"latency {args.latency}"
    )
    table = Table(title=title)
    for heading in (
        *("processes", "ring: ms a step", "speed-up", "efficiency"),
        *("server: ms a step", "speed-up", "efficiency"),
    ):
        table.add_column(heading, justify="right")
    for size in sizes:
        cells = [str(size)]
        for exchange in ("ring", "server"):
            seconds = prediction.step_seconds(
                measured, size, exchange, bandwidth, latency
            )
            speedup = size * measured.step_seconds / seconds
            cells += [
                f"{1000 * seconds:.1f}",
                f"{speedup:.2f}",
                f"{speedup / size:.1%}",
            ]
        table.add_row(*cells)
    console = Console()
    console.print(table)
    console.print(
        f"From {1000 * measured.step_seconds:.1f} ms a step of one process and "
        f"{measured.gradient_bytes / 1e6:.2f} MB of gradients; the same rows a process "
        "on any number. Nothing is taken to overlap with the computation, so these "
        "are lower bounds of what the exchange allows."
    )
    if args.plot is not None:
        drawn = [2**power for power in range(10)]
        lines = {
            exchange: {
                size: size
                * measured.step_seconds
                / prediction.step_seconds(measured, size, exchange, bandwidth, latency)
                for size in drawn
            }
            for exchange in ("ring", "server")
        }
        plot_speedups(args.plot, title, {}, lines)
        console.print(f"plot: {args.plot}")
    return 0
