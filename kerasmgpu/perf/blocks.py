"""Blocks of measured processes: nothing else of ours runs while one is measured."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kerasmgpu.errors import LaunchError

if TYPE_CHECKING:
    from kerasmgpu.perf.network import VirtualHosts

#: For TensorFlow to start, and for a rank to notice that another has failed.
START_TIMEOUT_SECONDS = 240.0


class Blocks:
    """Measures one model, block by block.

    Args:
        model: the name of a workload.
        seconds: time to measure in each block.
        warmup_steps: steps before that.
        hosts: where ranks run, one on each; on this machine where None.

    Raises:
        LaunchError: (each method) a measured process failed; with its last lines.
    """

    def __init__(
        self,
        model: str,
        seconds: float,
        warmup_steps: int = 30,
        hosts: VirtualHosts | None = None,
    ) -> None:
        self.model = model
        self.seconds = seconds
        self.warmup_steps = warmup_steps
        self.hosts = hosts
        self.cores = sorted(os.sched_getaffinity(0))

    def independent(
        self, count: int, share: int, batch_size: int | None = None
    ) -> list[dict[str, Any]]:
        """Plain Keras processes that do not talk to each other, all at once.

        Args:
            count: how many.
            share: cores for each, which no other gets.
            batch_size: of each; the workload's own where None.

        Returns:
            What each measured.
        """
        with tempfile.TemporaryDirectory(prefix="kerasmgpu-bench-") as folder:
            commands = []
            for index in range(count):
                own = self.cores[index * share : (index + 1) * share]
                options = ["--cores", ",".join(map(str, own)), "--index", str(index)]
                options += _batch_option(batch_size)
                commands.append(
                    self._program("plain", folder, "--count", str(count), *options)
                )
            return self._results(commands, folder, count)

    def ranks(
        self,
        count: int,
        batch_size: int | None = None,
        environ: Mapping[str, str] | None = None,
        gloo: bool = False,
        unfused: bool = False,
    ) -> list[dict[str, Any]]:
        """A wrapped model on the ranks of one job, as `kerasmgpu run` starts it.

        Args:
            count: how many.
            batch_size: of each; the workload's own where None.
            environ: variables for the ranks.
            gloo: whether they exchange over Gloo.
            unfused: whether BatchNormalization is left to Keras's own operations.

        Returns:
            What each rank measured.
        """
        with tempfile.TemporaryDirectory(prefix="kerasmgpu-bench-") as folder:
            options = _batch_option(batch_size) + ["--unfused"] * unfused
            program = self._program("ranks", folder, "--count", str(count), *options)
            return self._job(count, program, folder, environ, gloo)

    def rival_on_horovod(
        self, count: int, share: int, kind: str, environ: Mapping[str, str]
    ) -> list[dict[str, Any]]:
        """What else trains on Horovod, on ranks that each keep to their cores.

        Args:
            count: ranks.
            share: cores for each.
            kind: of `rivals.on_horovod`.
            environ: variables for the ranks.

        Returns:
            What each rank measured.
        """
        with tempfile.TemporaryDirectory(prefix="kerasmgpu-bench-") as folder:
            program = [sys.executable, "-m", "kerasmgpu.perf.rivals.on_horovod", kind]
            program += ["--count", str(count), "--share", str(share)]
            program += self._workload(folder)
            return self._job(count, program, folder, environ)

    def rival_torch(self, count: int, share: int, python: str) -> list[dict[str, Any]]:
        """PyTorch's DistributedDataParallel on ranks that each keep to their cores.

        Args:
            count: ranks.
            share: cores for each.
            python: an interpreter that has PyTorch.

        Returns:
            What each rank measured.
        """
        path = Path(__file__).parent / "rivals" / "torch_ddp.py"
        with tempfile.TemporaryDirectory(prefix="kerasmgpu-bench-") as folder:
            commands = []
            for rank in range(count):
                own = self.cores[rank * share : (rank + 1) * share]
                options = ["--rank", str(rank), "--count", str(count)]
                options += ["--cores", ",".join(map(str, own))]
                program = [python, str(path), *self._workload(folder)]
                commands.append([*program, *options])
            return self._results(commands, folder, count)

    def all_reduces(
        self, count: int, sizes: Sequence[int], environ: Mapping[str, str]
    ) -> list[dict[str, Any]]:
        """All-reduces on the ranks of one job.

        Args:
            count: ranks.
            sizes: bytes.
            environ: variables for the ranks.

        Returns:
            What each rank measured.
        """
        with tempfile.TemporaryDirectory(prefix="kerasmgpu-bench-") as folder:
            program = [sys.executable, "-m", "kerasmgpu.perf.all_reduce"]
            program += ["--folder", folder, "--sizes", ",".join(map(str, sizes))]
            return self._job(count, program, folder, environ)

    def emulated(
        self, count: int, step_seconds: float, exchange: str
    ) -> list[dict[str, Any]]:
        """Ranks of one job whose computing is emulated by waits.

        Args:
            count: ranks.
            step_seconds: of all waits of a step.
            exchange: "ring" or "server".

        Returns:
            What each rank measured.
        """
        with tempfile.TemporaryDirectory(prefix="kerasmgpu-bench-") as folder:
            program = [sys.executable, "-m", "kerasmgpu.perf.emulate"]
            program += ["--model", self.model, "--folder", folder]
            program += ["--step-seconds", str(step_seconds), "--exchange", exchange]
            program += ["--seconds", str(self.seconds)]
            program += ["--warmup-steps", str(self.warmup_steps)]
            return self._job(count, program, folder, None)

    def traced(self, count: int) -> tuple[list[dict[str, Any]], str]:
        """A few steps on the ranks of one job, under TensorFlow's profiler.

        Args:
            count: ranks.

        Returns:
            What each rank wrote, as of `traced_steps`, and Horovod's timeline.
        """
        with tempfile.TemporaryDirectory(prefix="kerasmgpu-bench-") as folder:
            program = [sys.executable, "-m", "kerasmgpu.perf.traced_steps"]
            program += ["--model", self.model, "--folder", folder]
            timeline = Path(folder, "timeline.json")
            environ = {"HOROVOD_TIMELINE": str(timeline)}
            results = self._job(count, program, folder, environ)
            return results, timeline.read_text(encoding="utf-8")

    def _job(
        self,
        count: int,
        program: Sequence[str],
        folder: str,
        environ: Mapping[str, str] | None,
        gloo: bool = False,
    ) -> list[dict[str, Any]]:
        launcher = [sys.executable, "-m", "kerasmgpu", "run"]
        if self.hosts is None or count == 1:
            launcher += ["-np", str(count)]
        else:
            names = self.hosts.names[:count]
            launcher += ["-H", ",".join(f"{name}:1" for name in names)]
            launcher += ["--network-interface", "eth0", *self.hosts.ssh_options]
            launcher = self.hosts.on_host(names[0], launcher)
        if gloo:
            launcher.append("--gloo")
        for name, value in (environ or {}).items():
            launcher += ["--env", f"{name}={value}"]
        return self._results([[*launcher, "--", *program]], folder, count)

    def pairs(self, wrapped_first: bool) -> list[list[float]]:
        """A plain and a wrapped model by turns in one process.

        Returns:
            Median step seconds (plain, wrapped) of each turn.
        """
        with tempfile.TemporaryDirectory(prefix="kerasmgpu-bench-") as folder:
            extra = ("--wrapped-first",) if wrapped_first else ()
            command = self._program("pairs", folder, *extra)
            pairs: list[list[float]] = self._results([command], folder, 1)[0]["pairs"]
        if not pairs:
            raise LaunchError(
                f"One turn of {self.model} took longer than {self.seconds} s. Measure "
                "for longer (--seconds)."
            )
        return pairs

    def _program(self, kind: str, folder: str, *extra: str) -> list[str]:
        program = [sys.executable, "-m", "kerasmgpu.perf.measure", kind, *extra]
        return program + self._workload(folder)

    def _workload(self, folder: str) -> list[str]:
        options = ["--model", self.model, "--folder", folder]
        options += ["--warmup-steps", str(self.warmup_steps)]
        return [*options, "--seconds", str(self.seconds)]

    def _results(
        self, commands: Sequence[Sequence[str]], folder: str, count: int
    ) -> list[dict[str, Any]]:
        timeout_seconds = START_TIMEOUT_SECONDS + self.seconds * 2
        with _running(commands, folder) as processes:
            try:
                for process in processes:
                    process.wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                raise LaunchError(
                    f"A measured process had not ended after {timeout_seconds:.0f} s. "
                    f"It printed last:\n{_last_lines(folder)}"
                ) from None
        codes = [process.returncode for process in processes]
        if any(codes):
            raise LaunchError(
                f"A measured process failed (exit codes {codes}). It printed last:\n"
                f"{_last_lines(folder)}"
            )
        results = []
        for index in range(count):
            path = Path(folder, f"result.{index}.json")
            results.append(json.loads(path.read_text(encoding="utf-8")))
        return results


def _batch_option(batch_size: int | None) -> list[str]:
    return [] if batch_size is None else ["--batch-size", str(batch_size)]


@contextlib.contextmanager
def _running(
    commands: Sequence[Sequence[str]], folder: str
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Starts programs; none is left when the block ends."""
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    processes: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as stack:
        try:
            for index, command in enumerate(commands):
                printed = stack.enter_context(Path(folder, f"out.{index}").open("wb"))
                processes.append(
                    subprocess.Popen(
                        command,
                        env=environ,
                        stdin=subprocess.DEVNULL,
                        stdout=printed,
                        stderr=subprocess.STDOUT,
                    )
                )
            yield processes
        finally:
            for process in processes:
                process.terminate()  # `kerasmgpu run` ends its ranks
            for process in processes:
                try:
                    process.wait(15)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _last_lines(folder: str) -> str:
    lines: list[str] = []
    for path in sorted(Path(folder).glob("out.*")):
        text = path.read_text(encoding="utf-8", errors="replace")
        lines += text.splitlines()[-15:]
    return "\n".join(lines)
