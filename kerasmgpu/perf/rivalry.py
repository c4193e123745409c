"""`kerasmgpu bench --beside`: a wrapped model beside other ways to train it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import shutil
import statistics
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kerasmgpu.errors import InvalidArgumentError
from kerasmgpu.transport import HOROVOD_ON_ONE_HOST, HOROVOD_WITHOUT_NCCL

if TYPE_CHECKING:
    from rich.table import Table

    from kerasmgpu.perf.blocks import Blocks

OURS = "kerasmgpu"


@dataclasses.dataclass(frozen=True)
class Rival:
    """A way to train, and what it is in the table.

    Attributes:
        label: what it is.
        models: the workloads it can train; all where empty.
    """

    label: str
    models: tuple[str, ...] = ()


RIVALS = {
    "unfused": Rival("kerasmgpu, fuse_batch_norm=False"),
    "bare": Rival("Keras 3, gradients averaged by horovod.tensorflow"),
    "tf_keras": Rival("tf_keras, horovod.tensorflow.keras"),
    "torch": Rival("PyTorch, DistributedDataParallel, Gloo", ("mnist_cnn", "resnet20")),
}


def check(names: Sequence[str], model: str, python: str) -> None:
    """Raises before anything is started where a rival cannot run here.

    Args:
        names: of rivals.
        model: the workload.
        python: an interpreter that has PyTorch, for "torch".
    """
    for name in names:
        if name not in RIVALS or names.count(name) > 1:
            raise InvalidArgumentError(
                f"Expected --beside to be different ones of {', '.join(RIVALS)}, with "
                f"commas between. Received: --beside {','.join(names)}."
            )
        models = RIVALS[name].models
        if models and model not in models:
            raise InvalidArgumentError(
                f"Expected --model {' or '.join(models)} with --beside {name}. "
                f"Received: --model {model}."
            )
    if "tf_keras" in names and importlib.util.find_spec("tf_keras") is None:
        release = ".".join(_tensorflow_version().split(".")[:2])
        raise InvalidArgumentError(
            "--beside tf_keras needs the package tf_keras, which is not installed. "
            f"Install it: pip install --no-deps tf_keras=={release}.*"
        )
    if "torch" in names:
        _check_torch(python)


def _tensorflow_version() -> str:
    for name in ("tensorflow-cpu", "tensorflow"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise InvalidArgumentError("--beside needs TensorFlow, which is not installed.")


def _check_torch(python: str) -> None:
    found = shutil.which(python)
    test = "import sys, torch.distributed as d; sys.exit(not d.is_gloo_available())"
    command = [found or python, "-c", test]
    if found and subprocess.run(command, capture_output=True).returncode == 0:
        return
    raise InvalidArgumentError(
        f"--beside torch needs a Python with PyTorch and Gloo. Received: {python}, "
        f"{'which has none' if found else 'which is no program'}. Make one: python -m "
        "venv torchenv && torchenv/bin/pip install torch; and name it: "
        "--beside-python torchenv/bin/python"
    )


def plan(
    blocks: Blocks, names: Sequence[str], size: int, share: int, python: str
) -> list[tuple[str, Callable[[], list[dict[str, Any]]]]]:
    """What to measure in a round: ours first, then the rivals.

    All have the same rows a rank, and cores of their own with a thread each. Rivals on
    Horovod have our settings of MPI and Horovod, with which they are faster than with
    Horovod's own.
    """
    settings = {**HOROVOD_ON_ONE_HOST, **HOROVOD_WITHOUT_NCCL}
    measures: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "unfused": partial(blocks.ranks, size, unfused=True),
        "bare": partial(blocks.rival_on_horovod, size, share, "bare", settings),
        "tf_keras": partial(blocks.rival_on_horovod, size, share, "tf_keras", settings),
        "torch": partial(blocks.rival_torch, size, share, python),
    }
    return [(OURS, partial(blocks.ranks, size)), *((n, measures[n]) for n in names)]


def summarize(rounds: Sequence[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """For ours and each rival, name of a figure → its value in each round.

    "samples_per_second" of all ranks together; "ours_to_it", our rate to the rival's
    in the same round.
    """
    results: dict[str, dict[str, list[float]]] = {}
    for name in rounds[0]:
        rates = [_rate(taken[name]) for taken in rounds]
        ours = [_rate(taken[OURS]) for taken in rounds]
        results[name] = {"samples_per_second": rates}
        if name != OURS:
            ratios = [a / b for a, b in zip(ours, rates, strict=True)]
            results[name]["ours_to_it"] = ratios
    return results


def _rate(ranks: list[dict[str, Any]]) -> float:
    return float(sum(rank["samples_per_second"] for rank in ranks))


def versions(taken: dict[str, Any]) -> dict[str, str]:
    """What a round says of the rivals' releases."""
    return {
        name: ranks[0]["version"]
        for name, ranks in taken.items()
        if "version" in ranks[0]
    }


def make_table(
    model: str, size: int, share: int, results: dict[str, dict[str, list[float]]]
) -> Table:
    """The table of `summarize`'s figures: medians over rounds, and their range."""
    from rich.table import Table

    table = Table(title=f"{model}, {size} ranks, {share} core(s) each")
    table.add_column("")
    table.add_column("samples/s", justify="right")
    table.add_column("kerasmgpu against it", justify="right")
    for name, figures in results.items():
        label = RIVALS[name].label if name in RIVALS else name
        ratios = figures.get("ours_to_it")
        table.add_row(
            label,
            _spread(figures["samples_per_second"], ".0f"),
            _spread(ratios, ".3f") if ratios else "",
        )
    return table


def _spread(values: Sequence[float], form: str) -> str:
    low, high = min(values), max(values)
    return f"{statistics.median(values):{form}} ({low:{form}}-{high:{form}})"
