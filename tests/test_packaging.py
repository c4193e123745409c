"""What pip installs: the wheel's content, plain and editable installs."""

import email
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kerasmgpu.horovod_environment import pinned_horovod_version

ROOT = Path(__file__).parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
OFFLINE = ["--no-build-isolation", "--no-deps", "--no-index"]


def run(*command: object, cwd: Path) -> str:
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, so that no build leaves files in the checkout."""
    copy = tmp_path_factory.mktemp("source") / "project"
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=ignored)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    run(*PIP, "wheel", *OFFLINE, "-w", source / "dist", source, cwd=source)
    (path,) = (source / "dist").glob("*.whl")
    return path


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The Python of a new environment without kerasmgpu, with all it depends on."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    program = "import sysconfig; print(sysconfig.get_path('purelib'))"
    inner = Path(run(python, "-c", program, cwd=tmp_path).strip())
    outer = run(sys.executable, "-c", program, cwd=tmp_path).strip()
    # Packages of a folder named in a .pth file are found; its own .pth files (an
    # editable kerasmgpu) are not read.
    (inner / "outer.pth").write_text(outer + "\n")
    return python


def test_wheel_holds_the_packages_and_no_top_level_callbacks(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"kerasmgpu", f"kerasmgpu-{wheel.name.split('-')[1]}.dist-info"}
    expected = {
        str(path.relative_to(ROOT))
        for path in [*ROOT.glob("kerasmgpu/**/*.py"), *ROOT.glob("callbacks/**/*.py")]
    }
    expected = {name.replace("callbacks/", "kerasmgpu/callbacks/") for name in expected}
    assert expected <= set(names)
    assert {"kerasmgpu/py.typed", "kerasmgpu/requirements.txt"} <= set(names)


def test_wheel_forces_no_tensorflow_on_anyone(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(archive.read(name))
    requirements = metadata.get_all("Requires-Dist") or []
    plain = [line for line in requirements if "extra ==" not in line]
    assert any(line.startswith("keras") for line in plain)
    assert not any("tensorflow" in line or "horovod" in line for line in plain)
    extras = set(metadata.get_all("Provides-Extra") or [])
    assert extras == {"cpu", "gpu", "mpi", "plot", "test"}
    assert metadata["Requires-Python"] == ">=3.10"


@pytest.mark.parametrize("kind", ["plain", "editable"])
def test_install_brings_callbacks_and_the_command(
    kind: str, source: Path, wheel: Path, python: Path, tmp_path: Path
) -> None:
    target = [wheel] if kind == "plain" else ["--editable", source]
    pip = [*PIP, "--python", python, "install", *OFFLINE]
    run(*pip, *target, cwd=tmp_path)
    program = (
        "import kerasmgpu.callbacks, kerasmgpu.horovod_environment as e; "
        "print(kerasmgpu.callbacks.__file__); print(e.pinned_horovod_version())"
    )
    file, pin = run(python, "-c", program, cwd=tmp_path).split()
    assert Path(file).is_relative_to(source if kind == "editable" else tmp_path)
    assert pin == pinned_horovod_version()
    command = python.parent / "kerasmgpu"
    for option in ("--version", "--help"):
        assert "kerasmgpu" in run(command, option, cwd=tmp_path)
    # The name `callbacks` stays free for the user's own modules.
    program = "import importlib.util as u; print(u.find_spec('callbacks'))"
    assert run(python, "-c", program, cwd=tmp_path).strip() == "None"


def test_pins_stand_once() -> None:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    assert sum("horovod==" in line for line in lines) == 1
    pins = [line for line in lines if line and not line.startswith("#")]
    assert pins
    assert all("==" in line for line in pins)
    for file in [*ROOT.glob("kerasmgpu/**/*.py"), ROOT / "setup.py", ROOT / "Makefile"]:
        assert f"horovod=={pinned_horovod_version()}" not in file.read_text(), file


def test_unknown_command_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "kerasmgpu", "install"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2
    assert "no command 'install'" in result.stderr
    assert "install-horovod" in result.stderr
