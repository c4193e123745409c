"""`kerasmgpu bench`: how fast ranks train here, beside what could be reached."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from kerasmgpu.cli import _bench_beside as bench_beside
from kerasmgpu.cli import _bench_emulated as bench_emulated
from kerasmgpu.errors import InvalidArgumentError

HELP = "measure how fast ranks train on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kerasmgpu bench`."""
    from kerasmgpu.perf.scaling import MODES
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
    add(
        "--mode",
        choices=MODES,
        default="weak",
        help="weak: each rank has the same rows on any number of ranks; strong: they "
        "share one batch (default: weak)",
    )
    add("--rounds", type=int, default=3, metavar="R", help="repetitions (default: 3)")
    add("--seconds", type=float, default=8.0, help="of each measurement (default: 8)")
    add("--json", type=Path, metavar="FILE", help="write a record with all numbers")
    add("--plot", type=Path, metavar="FILE", help="draw speed-ups, such as out.png")
    add(
        "--tune",
        type=Path,
        metavar="FILE",
        help="instead: search the fastest settings for this model here, and write them "
        "for `kerasmgpu run --settings FILE`",
    )
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="instead: a Chrome trace of a few steps, computation and communication by "
        "rank, and the share of communication that nothing hides",
    )
    add(
        "--collectives",
        action="store_true",
        help="instead: all-reduces by size, with Horovod's own settings and ours",
    )
    bench_beside.add_arguments(parser)
    bench_emulated.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Measures, round by round; prints tables."""
    _check(args)
    if args.emulate_step_seconds is not None or args.all_reduce is not None:
        return bench_emulated.main(args)
    bench_emulated.check_not_used(args)
    if args.beside is not None:
        return _measure_beside(args)
    if args.collectives:
        return _measure_collectives(args)
    if args.tune is not None:
        return _tune(args)
    if args.trace is not None:
        return _trace(args)
    return _measure_training(args)


def _measure_training(args: argparse.Namespace) -> int:
    from rich.console import Console

    from kerasmgpu.perf import plot, record, scaling
    from kerasmgpu.perf.blocks import Blocks
    from kerasmgpu.perf.workloads import WORKLOADS

    cores = len(os.sched_getaffinity(0))
    sizes = _sizes(args.np, cores)
    batches = scaling.batch_sizes(
        args.mode, WORKLOADS[args.model].per_rank_batch_size, sizes
    )
    if args.plot is not None:
        plot.check_can_plot(args.plot)
        if max(sizes) == 1:
            raise InvalidArgumentError(
                "Expected --np with two ranks or more for a plot. Received: --np 1."
            )
    console = Console()
    blocks = Blocks(args.model, args.seconds)
    raw: dict[str, Any] = {"load_of_others_percent": [], "rounds": []}
    with console.status("") as status:
        for number in range(args.rounds):
            taken: dict[str, Any] = {}
            raw["rounds"].append(taken)
            for size in sizes:
                plan = _plan(blocks, size, cores // size, number, batches)
                for name, measure in plan:
                    status.update(
                        f"{args.model}, round {number + 1} of {args.rounds}, "
                        f"{size} process(es): {name}"
                    )
                    with record.load_of_others() as load:
                        taken[f"{size}: {name}"] = measure()
                    raw["load_of_others_percent"] += load
    results = scaling.summarize(raw["rounds"], sizes)
    for table in scaling.make_tables(args.model, cores, results):
        console.print(table)
    fit = scaling.fitted(results, args.mode)
    if fit:
        console.print(scaling.fit_text(fit))
    _say_how(console, args, raw)
    if args.json is not None:
        ranks = [taken.get(f"{max(sizes)}: ranks") for taken in raw["rounds"]]
        made = record.make_record(
            results,
            raw,
            model=args.model,
            mode=args.mode,
            batch_sizes={str(size): batches[size] for size in sizes},
            gradient_bytes=ranks[0][0]["gradient_bytes"] if ranks[0] else None,
            fit=fit,
        )
        record.write_record(args.json, made)
        console.print(f"record: {args.json}")
    if args.plot is not None:
        measured = {
            label: {int(size): results[size][name] for size in results if size != "1"}
            for label, name in (
                ("ranks", "ranks_to_alone"),
                ("independent processes", "ceiling_to_alone"),
            )
        }
        model = scaling.model_of(fit, args.mode)
        line = {size: model.speedup(size) for size in range(1, max(sizes) + 1)}
        title = f"{args.model}, {args.mode} scaling, CPU processes on {cores} cores"
        plot.plot_speedups(args.plot, title, measured, {"fitted model": line})
        console.print(f"plot: {args.plot}")
    return 0


def _tune(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from kerasmgpu.errors import LaunchError
    from kerasmgpu.perf import settings, tuning
    from kerasmgpu.perf.blocks import Blocks

    cores = len(os.sched_getaffinity(0))
    size = _ranks_of_one_job(args, cores, "--tune")
    blocks = Blocks(args.model, args.seconds)
    console = Console()
    own = sorted(set(os.environ) & {name for name, _ in tuning.CHOICES})
    if own:
        raise InvalidArgumentError(
            "Expected an environment in which nothing is set that is to be searched. "
            f"Received: {', '.join(own)}. Unset it."
        )

    def measure(tried: settings.Settings) -> float:
        try:
            ranks = blocks.ranks(size, None, tried.environment, tried.gloo)
        except LaunchError:
            if tried == settings.Settings({}):
                raise
            return 0.0  # it cannot run so here
        return tuning.rate_of(ranks)

    with console.status("") as status:

        def tell(what: str) -> None:
            status.update(f"{args.model} on {size} ranks: {what}")

        best, trials = tuning.search(measure, args.rounds, cores // size, tell)
    table = Table(
        title=f"{args.model} on {size} ranks: settings, against the best so far"
    )
    for heading in ("setting", "speed", "kept"):
        table.add_column(heading)
    for trial in trials:
        low, high = min(trial.gains), max(trial.gains)
        middle = statistics.median(trial.gains)
        speed = f"{middle:.3f} ({low:.3f}-{high:.3f})" if middle else "does not run"
        table.add_row(trial.what, speed, "yes" if trial.kept else "")
    console.print(table)
    settings.write_settings(
        args.tune,
        best,
        model=args.model,
        num_ranks=size,
        trials=[dataclasses.asdict(trial) for trial in trials],
    )
    console.print(
        f"{args.rounds} round(s) of {args.seconds:g} s; a setting is kept where it is "
        f"faster by {tuning.LEAST_GAIN - 1:.0%} in the median and in every round. "
        f"Settings: {args.tune}"
    )
    return 0


def _ranks_of_one_job(args: argparse.Namespace, cores: int, option: str) -> int:
    size = max(_sizes(args.np, cores))
    if size == 1:
        raise InvalidArgumentError(
            f"Expected --np with two ranks or more for {option}. Received: "
            f"--np {args.np or 1}."
        )
    return size


def _trace(args: argparse.Namespace) -> int:
    import json

    from rich.console import Console

    from kerasmgpu.perf import record, trace, traced_steps
    from kerasmgpu.perf.blocks import Blocks

    size = _ranks_of_one_job(args, len(os.sched_getaffinity(0)), "--trace")
    console = Console()
    blocks = Blocks(args.model, args.seconds)
    with (
        console.status(f"{args.model}: steps on {size} ranks"),
        record.load_of_others() as load,
    ):
        communication, computation = traced_steps.merge(*blocks.traced(size))
    share = trace.exposed_share(communication, computation)
    made = trace.chrome_trace(communication, computation)
    args.trace.write_text(json.dumps(made), encoding="utf-8")
    for rank, spans in communication.items():
        exposed = trace.exposed(spans, computation[rank]) / 1e3
        console.print(
            f"rank {rank}: {trace.total(computation[rank]) / 1e3:.1f} ms of "
            f"computation, {trace.total(spans) / 1e3:.2f} ms of communication, "
            f"{exposed:.2f} ms of it exposed"
        )
    console.print(
        f"{args.model}, {traced_steps.STEPS} steps on {size} ranks: {share:.0%} of the "
        "communication is exposed (nothing is computed meanwhile on that rank). Other "
        f"programs took up to {max(load):.0f} % of the processors; the profiler takes "
        f"some time of its own.\ntrace: {args.trace}"
    )
    return 0


def _measure_beside(args: argparse.Namespace) -> int:
    from rich.console import Console

    from kerasmgpu.perf import record

    size = _ranks_of_one_job(args, len(os.sched_getaffinity(0)), "--beside")
    table, results, raw, facts = bench_beside.measure(args, size)
    console = Console()
    console.print(table)
    _say_how(console, args, raw)
    if args.json is not None:
        record.write_record(args.json, record.make_record(results, raw, **facts))
        console.print(f"record: {args.json}")
    return 0


def _measure_collectives(args: argparse.Namespace) -> int:
    from rich.console import Console

    from kerasmgpu.perf import all_reduce, record
    from kerasmgpu.perf.blocks import Blocks

    size = _ranks_of_one_job(args, len(os.sched_getaffinity(0)), "--collectives")
    console = Console()
    blocks = Blocks(args.model, args.seconds)
    raw: dict[str, Any] = {}
    run = partial(blocks.all_reduces, size, all_reduce.SIZES)
    with console.status("") as status, record.load_of_others() as load:
        raw["rounds"] = all_reduce.measure_rounds(run, args.rounds, status.update)
    raw["load_of_others_percent"] = load
    results = all_reduce.summarize(raw["rounds"])
    console.print(all_reduce.make_table(results, size))
    _say_how(console, args, raw)
    if args.json is not None:
        made = record.make_record(results, raw, num_ranks=size)
        record.write_record(args.json, made)
        console.print(f"record: {args.json}")
    return 0


def _say_how(console: Any, args: argparse.Namespace, raw: dict[str, Any]) -> None:
    busy = max(raw["load_of_others_percent"])
    each = "" if args.collectives else f" of {args.seconds:g} s a measurement"
    console.print(
        f"{args.rounds} round(s){each}; medians, and the lowest and highest round. "
        f"Other programs took up to {busy:.0f} % of the processors meanwhile."
    )
    if busy > 10:
        console.print("[yellow]Measure again on a quiet machine.[/]")


def _plan(
    blocks: Any, size: int, share: int, number: int, batches: dict[int, int]
) -> list[tuple[str, Callable[[], Any]]]:
    """What to measure for a number of ranks in a round, in an order that alternates."""
    if size == 1:
        return [("plain and wrapped", partial(blocks.pairs, bool(number % 2)))]
    each = batches[size]
    plan: list[tuple[str, Callable[[], Any]]] = [
        ("alone", partial(blocks.independent, 1, share, batches[1])),
        ("independent", partial(blocks.independent, size, share, each)),
        ("ranks", partial(blocks.ranks, size, each)),
    ]
    return plan[::-1] if number % 2 else plan


def _sizes(text: str | None, cores: int) -> list[int]:
    from kerasmgpu.perf.prediction import parse_sizes

    if text is None:
        return [1, 2] if cores > 1 else [1]
    sizes = parse_sizes(text)
    if max(sizes) > cores:
        raise InvalidArgumentError(
            f"Expected at most one rank a core: there are {cores} core(s). Received: "
            f"--np {text}."
        )
    return sizes


def _check(args: argparse.Namespace) -> None:
    if args.rounds < 1 or not 0 < args.seconds < math.inf:
        raise InvalidArgumentError(
            "Expected --rounds and --seconds to be positive, and no endless "
            f"measurement. Received: --rounds {args.rounds} --seconds "
            f"{args.seconds:g}."
        )
    bench_beside.check(args)
    modes = (
        *("beside", "collectives", "tune", "trace"),
        *("emulate_step_seconds", "all_reduce"),
    )
    chosen = [name.replace("_", "-") for name in modes if getattr(args, name)]
    if len(chosen) > 1:
        raise InvalidArgumentError(
            "Expected one thing to measure at a time. Received: --"
            f"{' --'.join(chosen)}."
        )
    unused = {"collectives": ("plot",), "beside": ("plot",), "tune": ("json", "plot")}
    unused["trace"] = unused["tune"]
    unused |= {"all-reduce": ("plot",), "emulate-step-seconds": ()}
    for mode in chosen:
        for name in unused[mode]:
            if getattr(args, name) is not None:
                raise InvalidArgumentError(
                    f"--{mode} writes no {name}. Received: --{name} "
                    f"{getattr(args, name)}. Leave it out."
                )
    for name in ("json", "plot", "tune", "trace"):
        path = getattr(args, name)
        if path is not None and not os.access(path.absolute().parent, os.W_OK):
            raise InvalidArgumentError(
                f"Expected a FILE that can be written. Received: --{name} {path}."
            )
