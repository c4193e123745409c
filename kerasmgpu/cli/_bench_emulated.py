"""`kerasmgpu bench` for what this machine is not: devices that wait, slow links."""

from __future__ import annotations

import argparse
import contextlib
import re
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from kerasmgpu.errors import InvalidArgumentError

#: Of an all-reduce: a rank holds several copies of it.
MAX_BYTES = 2 * 10**9
#: Emulated ranks: each is a process with a TensorFlow of its own.
MAX_RANKS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds these options of `kerasmgpu bench`."""
    add = parser.add_argument
    add(
        "--emulate-step-seconds",
        type=float,
        metavar="S",
        help="instead: emulated devices, whose steps are waits of S seconds (np may "
        "exceed the cores)",
    )
    add(
        "--exchange",
        choices=("ring", "server", "both"),
        default="ring",
        help="of emulated devices: by a ring, or all through rank 0 (default: ring)",
    )
    add(
        "--all-reduce",
        metavar="SIZE",
        help="instead: the time of one all-reduce of SIZE, such as 12.5MB",
    )
    add(
        "--bandwidth",
        metavar="RATE",
        help="for these two: each rank on an emulated host of its own, with a link of "
        "this rate, such as 1gbit (as root)",
    )


def main(args: argparse.Namespace) -> int:
    """Measures emulated devices, or one all-reduce; says "emulated" where it is."""
    from kerasmgpu.perf.model import parse_bandwidth
    from kerasmgpu.perf.network import check_can_make_hosts
    from kerasmgpu.perf.prediction import parse_sizes

    if args.np is None or max(parse_sizes(args.np)) < 2:
        raise InvalidArgumentError(
            "Expected --np with two ranks or more to emulate, such as --np 2,4. "
            f"Received: --np {args.np or 1}."
        )
    sizes = parse_sizes(args.np)
    if max(sizes) > MAX_RANKS:
        raise InvalidArgumentError(
            f"Expected at most {MAX_RANKS} ranks on this machine. Received: --np "
            f"{args.np}. `kerasmgpu predict` tells of more."
        )
    bandwidth = parse_bandwidth(args.bandwidth) if args.bandwidth else None
    if bandwidth is not None:
        check_can_make_hosts()
    if args.all_reduce is not None:
        return _time_all_reduce(args, max(sizes), bandwidth)
    return _emulate(args, sizes, bandwidth)


def check_not_used(args: argparse.Namespace) -> None:
    """Raises where an option is given without the mode it belongs to."""
    if args.bandwidth is not None or args.exchange != "ring":
        raise InvalidArgumentError(
            "Expected --emulate-step-seconds or --all-reduce beside --bandwidth, and "
            "--emulate-step-seconds beside --exchange. Received: neither."
        )


@contextlib.contextmanager
def _hosts(count: int, bandwidth: float | None) -> Iterator[Any]:
    """Hosts with slow links, or None where nothing is to be slowed."""
    from kerasmgpu.perf.network import VirtualHosts

    if bandwidth is None:
        yield None
        return
    names = [f"host{number}" for number in range(1, count + 1)]
    # A bench that is ended must not leave hosts behind, as one interrupted does not.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    stack = contextlib.ExitStack()
    stack.callback(signal.signal, signal.SIGTERM, before)
    folders = tempfile.TemporaryDirectory(prefix="kerasmgpu-hosts-")
    with stack, folders as folder:
        python_bin = Path(sys.executable).parent
        with VirtualHosts(Path(folder, "set-up"), python_bin, names, bandwidth) as made:
            yield made


def _emulate(
    args: argparse.Namespace, sizes: list[int], bandwidth: float | None
) -> int:
    from rich.console import Console

    from kerasmgpu.perf import emulate, plot, record, scaling
    from kerasmgpu.perf.blocks import Blocks

    emulate.check(args.model, args.emulate_step_seconds)
    if args.plot is not None:
        plot.check_can_plot(args.plot)
    console = Console()
    exchanges = ("ring", "server") if args.exchange == "both" else (args.exchange,)
    with _hosts(max(sizes), bandwidth) as hosts, console.status("") as status:
        blocks = Blocks(args.model, args.seconds, emulate.WARMUP_STEPS, hosts)

        def run(size: int, exchange: str) -> list[dict[str, Any]]:
            return blocks.emulated(size, args.emulate_step_seconds, exchange)

        with record.load_of_others() as load:
            rounds = emulate.measure_rounds(
                run, sizes, exchanges, args.rounds, status.update
            )
    results = emulate.summarize(rounds, bandwidth)
    link = f"links of {args.bandwidth}" if args.bandwidth else "this machine's memory"
    title = (
        f"emulated devices: {args.model}, steps of "
        f"{1e3 * args.emulate_step_seconds:g} ms, {link}"
    )
    console.print(emulate.make_table(title, results))
    console.print(
        f"Emulated: computing is a wait; weights, collectives and updates are real. "
        f"{args.rounds} round(s) of {args.seconds:g} s; medians, and the lowest and "
        f"highest round. Other programs took {load[0]:.0f} % of the processors."
    )
    fits = emulate.fits_of(results)
    for exchange, fit in fits.items():
        console.print(f"Emulated, {exchange}. {scaling.fit_text(fit)}")
    num_bytes = rounds[0]["1: ring"][0]["gradient_bytes"]
    if args.json is not None:
        made = record.make_record(
            results,
            {"load_of_others_percent": load, "rounds": rounds},
            emulated=True,
            model=args.model,
            mode="weak",
            step_seconds=args.emulate_step_seconds,
            bandwidth_bytes_per_second=bandwidth,
            gradient_bytes=num_bytes,
            fits=fits,
        )
        record.write_record(args.json, made)
        console.print(f"record: {args.json}")
    if args.plot is not None:
        measured = {
            f"emulated, {exchange}": {
                int(size): by_size[size]["speedup"] for size in by_size if size != "1"
            }
            for exchange, by_size in results.items()
        }
        lines: dict[str, dict[int, float]] = {}
        if bandwidth is not None:
            alone = statistics.median(results[exchanges[0]]["1"]["step_seconds"])
            lines = emulate.cost_lines(alone, num_bytes, bandwidth, max(sizes))
        plot.plot_speedups(args.plot, title, measured, lines)
        console.print(f"plot: {args.plot}")
    return 0


def _time_all_reduce(
    args: argparse.Namespace, size: int, bandwidth: float | None
) -> int:
    from rich.console import Console

    from kerasmgpu.perf import record
    from kerasmgpu.perf.blocks import Blocks
    from kerasmgpu.perf.model import ring_seconds

    num_bytes = _parse_size(args.all_reduce)
    console = Console()
    with _hosts(size, bandwidth) as hosts, console.status("") as status:
        run = partial(
            Blocks(args.model, args.seconds, hosts=hosts).all_reduces,
            size,
            [num_bytes],
            {},
        )
        rounds = []
        with record.load_of_others() as load:
            for number in range(args.rounds):
                status.update(f"all-reduce: round {number + 1} of {args.rounds}")
                ranks = run()
                rounds.append(
                    max(r[str(num_bytes)]["all_reduce_seconds"] for r in ranks)
                )
    seconds = statistics.median(rounds)
    results: dict[str, Any] = {"seconds": rounds}
    where = f"{size} ranks"
    said = ""
    if bandwidth is not None:
        where = f"{size} emulated hosts at {args.bandwidth}"
        results["ring_bound_seconds"] = bound = ring_seconds(num_bytes, size, bandwidth)
        said = (
            f"; the ring's bound is {1e3 * bound:.1f} ms, {seconds / bound:.3f} of it"
        )
    console.print(
        f"all-reduce of {num_bytes:,} bytes on {where}: {1e3 * seconds:.2f} ms "
        f"({1e3 * min(rounds):.2f}-{1e3 * max(rounds):.2f}){said}. {args.rounds} "
        f"round(s); other programs took {load[0]:.0f} % of the processors."
    )
    if args.json is not None:
        made = record.make_record(
            results,
            {"load_of_others_percent": load},
            emulated=bandwidth is not None,
            bytes=num_bytes,
            num_ranks=size,
            bandwidth_bytes_per_second=bandwidth,
        )
        record.write_record(args.json, made)
        console.print(f"record: {args.json}")
    return 0


def _parse_size(text: str) -> int:
    """Bytes of `12.5MB`, `64kb` or `4096`; whole float32 numbers."""
    units = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)b?", text.lower())
    asked = float(found[1]) * units[found[2]] if found else 0.0
    size = round(min(asked, MAX_BYTES + 4)) // 4 * 4
    if not 4 <= size <= MAX_BYTES:
        raise InvalidArgumentError(
            "Expected --all-reduce as a number of bytes, such as 12.5MB or 4096, up to "
            f"{MAX_BYTES // 10**9} GB. Received: {text!r}."
        )
    return size
