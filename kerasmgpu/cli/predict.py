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
        metavar="25gbit",
        help="of each process's link, each way (bits: gbit, mbit; bytes: gb, mb); "
        "default: links as measured",
    )
    add("--latency", default="20us", help="of a message (default: 20us)")
    add("--np", default="8,64,512", metavar="8,64", help="numbers of processes")
    add("--plot", type=Path, metavar="FILE", help="draw them, up to 512 processes")


def main(args: argparse.Namespace) -> int:
    """Prints the fit and a table; draws a plot."""
    from rich.console import Console
    from rich.table import Table

    from kerasmgpu.perf import prediction, scaling
    from kerasmgpu.perf.model import parse_bandwidth, parse_seconds
    from kerasmgpu.perf.plot import check_can_plot, plot_speedups

    latency = parse_seconds(args.latency)
    bandwidth = None if args.bandwidth is None else parse_bandwidth(args.bandwidth)
    sizes = prediction.parse_sizes(args.np)
    if args.plot is not None:
        check_can_plot(args.plot)
    measured = prediction.read_record(args.record)

    def seconds(exchange: str, size: int) -> float:
        if bandwidth is None:
            return measured.steps.step_seconds(size)
        return measured.on_links(size, exchange, bandwidth, latency)

    where = (
        "links as measured"
        if bandwidth is None
        else f"links of {args.bandwidth}, latency {args.latency}"
    )
    emulated = "emulated devices: " if measured.emulated else ""
    title = f"{emulated}{measured.model}, predicted (not measured): {where}"
    exchanges = ("ring",) if bandwidth is None else ("ring", "server")
    table = Table(title=title)
    table.add_column("processes", justify="right")
    for exchange in exchanges:
        for heading in (f"{exchange}: ms a step", "speed-up", "efficiency"):
            table.add_column(heading, justify="right")
    share = "the same rows" if measured.mode == "weak" else "a share of the same batch"
    for size in sizes:
        cells = [str(size)]
        for exchange in exchanges:
            step = seconds(exchange, size)
            speedup = measured.speedup(size, step)
            cells += [f"{1000 * step:.1f}", f"{speedup:.2f}", f"{speedup / size:.1%}"]
        table.add_row(*cells)
    console = Console()
    console.print(scaling.fit_text(measured.fit))
    console.print(table)
    used = (
        "All of the fit is used: links, and what a further process adds, are taken to "
        "be those of the measurement"
        if bandwidth is None
        else f"Of the fit, its computing ({1000 * measured.fit['compute']:.1f} ms) is "
        f"used; the exchange of {measured.gradient_bytes / 1e6:.2f} MB is the cost "
        "model's, for these links. Nothing is taken to overlap with the computation, "
        "and no process to be slower than another"
    )
    console.print(f"{used}. Each process has {share} on any number.")
    if args.plot is not None:
        drawn = [2**power for power in range(10)]
        lines = {
            exchange: {
                size: measured.speedup(size, seconds(exchange, size)) for size in drawn
            }
            for exchange in exchanges
        }
        plot_speedups(args.plot, title, {}, lines)
        console.print(f"plot: {args.plot}")
    return 0
