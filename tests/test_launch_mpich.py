"""MPICH's mpirun, for real, from PyPI: kept in the user's cache, never in .venv."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import PYTHON_BIN, no_job_outlives_its_test, python, run  # noqa: F401

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def mpich_bin() -> Path:
    """A folder with MPICH's `mpirun` alone."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    tag = f"mpich-py{sys.version_info[0]}{sys.version_info[1]}"
    home = cache / "kerasmgpu" / "tests" / tag
    mpirun = home / "bin" / "mpirun"
    if not mpirun.exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        install = [str(home / "bin" / "python"), "-m", "pip", "install", "-q", "mpich"]
        subprocess.run(install, check=True, timeout=200)
    return mpirun.parent


def path_with(folder: Path, tmp_path: Path) -> dict[str, str]:
    # Only the starter: the Python of that environment must not be found first.
    for name in ("mpirun", "hydra_pmi_proxy", "mpiexec.hydra"):
        (tmp_path / name).symlink_to(folder / name)
    return {"PATH": f"{tmp_path}:{PYTHON_BIN}:{os.environ['PATH']}"}


def test_ranks_run(mpich_bin: Path, tmp_path: Path) -> None:
    env = path_with(mpich_bin, tmp_path)
    ended = run(
        *("-np", "3"),
        *python("print(rank, os.environ['PMI_RANK'], os.environ['KERASMGPU_SIZE'])"),
        env=env,
    )
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == [f"[{r}] {r} {r} 3" for r in range(3)]
    ended = run(
        "-np", "2", *python("if rank == 1: sys.exit(9)\ntime.sleep(60)"), env=env
    )
    assert ended.code == 9
    assert ended.seconds < 10
    assert "rank 1 of 2" in ended.last_lines


def test_a_horovod_built_for_another_mpi_is_refused(
    mpich_bin: Path, tmp_path: Path
) -> None:
    ended = run(
        *("-np", "2"),
        *python(
            "import kerasmgpu\n"
            "import keras, time\n"
            "began = time.monotonic()\n"
            "try: kerasmgpu.HorovodStrategy()\n"
            "finally: print('after', time.monotonic() - began)\n"
            "print('trained alone')"
        ),
        env=path_with(mpich_bin, tmp_path),
    )
    assert ended.code == 1
    assert "trained alone" not in ended.out
    # Before anything started, and from every rank.
    assert "mpirun is of MPICH" in ended.err
    assert "Horovod was built for Open MPI" in ended.err
    assert "but Horovod, built for Open MPI, joined a job of 1" in ended.err
    seconds = [float(line.split()[-1]) for line in ended.out.splitlines()]
    assert all(taken < 5 for taken in seconds)
