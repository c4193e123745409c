"""`kerasmgpu bench --beside`: other ways to train a model, in the same rounds."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from kerasmgpu.errors import InvalidArgumentError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds these options of `kerasmgpu bench`."""
    from kerasmgpu.perf.rivalry import RIVALS

    parser.add_argument(
        "--beside",
        metavar="NAMES",
        help=f"instead: ranks beside other ways to train: {', '.join(RIVALS)}",
    )
    parser.add_argument(
        "--beside-python",
        metavar="PYTHON",
        help="for --beside torch: a Python that has PyTorch (default: this one)",
    )


def check(args: argparse.Namespace) -> None:
    """Raises where an option is given without the one it belongs to."""
    if args.beside_python and "torch" not in (args.beside or "").split(","):
        raise InvalidArgumentError(
            "Expected --beside torch beside --beside-python. Received: "
            f"--beside-python {args.beside_python} without it."
        )


def measure(
    args: argparse.Namespace, size: int
) -> tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Measures round by round, in an order that alternates.

    Returns:
        The table, the figures, the raw numbers, and facts for the record.
    """
    from rich.console import Console

    from kerasmgpu.perf import record, rivalry
    from kerasmgpu.perf.blocks import Blocks

    names = args.beside.split(",")
    python = args.beside_python or sys.executable
    rivalry.check(names, args.model, python)
    share = len(os.sched_getaffinity(0)) // size
    blocks = Blocks(args.model, args.seconds)
    plan = rivalry.plan(blocks, names, size, share, python)
    raw: dict[str, Any] = {"load_of_others_percent": [], "rounds": []}
    with Console().status("") as status:
        for number in range(args.rounds):
            taken: dict[str, Any] = {}
            for name, run in plan[:: -1 if number % 2 else 1]:
                status.update(
                    f"{args.model}, round {number + 1} of {args.rounds}: {name}"
                )
                with record.load_of_others() as load:
                    taken[name] = run()
                raw["load_of_others_percent"] += load
            raw["rounds"].append({name: taken[name] for name, _ in plan})
    results = rivalry.summarize(raw["rounds"])
    table = rivalry.make_table(args.model, size, share, results)
    facts = {"model": args.model, "num_ranks": size}
    return table, results, raw, facts | {"rivals": rivalry.versions(raw["rounds"][0])}
