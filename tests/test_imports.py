"""Who may import whom. This table is the architecture; CONTRIBUTING.md explains it."""

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

BASE = {"errors", "topology"}
CORE = BASE | {"report", "groups", "collectives", "keras_compat", "overriding"}
STEP = {"devices", "control", "data", "losses", "metrics", "state", "optimizer"}

# Module (or the sub-package it is in) -> modules of this project it may import. A
# sub-package may always import itself.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "topology": {"errors"},
    "groups": {"errors"},
    "shards": CORE,
    "transport": set(),
    "roll_call": BASE,
    "report": BASE | {"roll_call"},
    "keras_compat": {"errors"},
    "horovod_environment": {"errors"},
    "logged_command": {"errors"},
    "horovod_gpu": {"errors", "horovod_environment"},
    "horovod_build": {
        *("errors", "horovod_environment", "horovod_gpu", "logged_command"),
    },
    "collectives": BASE
    | {"report", "groups", "transport", "horovod_environment", "horovod_build"},
    "tensors": CORE,
    "control": CORE,
    "fit_data": CORE,
    "timing": set(),
    "overriding": set(),
    "derived_logs": set(),
    "fused_updates": set(),
    "buckets": set(),
    "calibration": CORE | STEP,
    # `control` knows the step that the others take part in.
    **dict.fromkeys(STEP - {"control"}, CORE | {"control"}),
    "devices": CORE | {"transport"},
    "slices": CORE,
    "optimizer": CORE
    | {"control", "timing", "fused_updates", "shards", "slices"}
    | {"buckets"},
    "state": CORE | {"optimizer", "shards"},
    "xla_step": CORE | {"control", "optimizer"},
    "micro_batches": CORE | STEP | {"derived_logs"},
    "balance": CORE | {"control", "data", "timing"},
    "memory_step": CORE | STEP | {"step", "micro_batches", "layers", "timing"},
    "step": CORE | STEP | {"derived_logs", "layers", "timing", "balance"},
    "data": CORE | {"control", "fit_data", "state"},
    "resume": CORE | STEP | {"step", "fit_data", "callback_list", "shards"},
    "callback_list": CORE | {"data", "rank_zero_saves", "shards"},
    "rank_zero_saves": CORE | {"files", "shards", "state"},
    "files": CORE | {"optimizer", "state", "shards"},
    "predictions": CORE,
    "model": CORE
    | STEP
    | {
        "step",
        "micro_batches",
        "callback_list",
        "files",
        "predictions",
        "shards",
        "fit_data",
        "session",
        "layers",
        "xla_step",
    },
    "session": CORE
    | STEP
    | {"step", "fit_data", "resume", "timing", "calibration", "xla_step", "shards"}
    | {"micro_batches", "memory_step", "balance", "layers"},
    "strategy": CORE | STEP | {"micro_batches", "model", "session", "tensors"},
    "callbacks": BASE | {"collectives", "state", "files", "shards", "perf.model"},
    "layers": CORE | {"control", "devices", "shards"},
    "launch": BASE | {"report", "transport"},
    "diagnostics": BASE | {"launch", "horovod_environment"},
    "perf": BASE | {"launch", "public", "transport"},
    "perf.model": {"errors"},
    # Programs that are measured beside this package.
    "perf.rivals": {"errors", "topology", "perf"},
    # The exchange through rank 0, which only this comparison uses.
    "perf.emulate": BASE | {"public", "collectives", "optimizer"},
    "cli": BASE
    | {"launch", "diagnostics", "horovod_environment", "horovod_gpu", "horovod_build"},
    "__init__": {"strategy", "launch", "callbacks", "layers", "errors"},
    "__main__": {"cli"},
    "examples": {"public"},
}
# Inside functions these may import anything.
FREE_INSIDE_FUNCTIONS = {"cli"}

# Works where neither TensorFlow nor Horovod is installed.
WITHOUT_TENSORFLOW = {
    *("__init__", "__main__", "errors", "topology", "roll_call", "report", "transport"),
    *("launch", "diagnostics"),
    *("horovod_environment", "horovod_gpu", "horovod_build"),
    *("logged_command", "perf.model"),
}
HEAVY = ("tensorflow", "keras", "horovod", "tf_keras")
FORBIDDEN_EVERYWHERE = (
    "tensorflow.python",
    "horovod.keras",
    "horovod.tensorflow.keras",
)
#: Horovod's layer for Keras 2 is measured, and never a part of the package.
MEASURES_HOROVODS_KERAS = "perf.rivals.on_horovod"
# Outside module -> the only modules here that may import it.
ONLY_IMPORTER = {
    "horovod": {"collectives", "perf.rivals"},
    "tf_keras": {"perf.rivals"},
    "torch": {"perf.rivals"},
    "keras.src": {"keras_compat"},  # private: one file to mend when Keras changes
}


@dataclass(frozen=True)
class Import:
    """One imported module, with where it stands."""

    name: str
    line: int
    inside_function: bool


def imports_of(source: str) -> Iterator[Import]:
    def visit(node: ast.AST, inside: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, inside)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield Import("." * node.level, node.lineno, inside)
            else:
                for alias in node.names:
                    yield Import(f"{node.module}.{alias.name}", node.lineno, inside)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "keras.src":
            # `keras.src.x` needs no import statement of its own.
            yield Import("keras.src", node.lineno, inside)
        elif (
            isinstance(node, ast.Attribute)
            and ast.unparse(node.value) == "kerasmgpu"
            and not node.attr.startswith("__")
        ):
            # Nor does `kerasmgpu.x`, which loads lazily.
            yield Import(f"kerasmgpu.{node.attr}", node.lineno, inside)
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(ast.parse(source), False)


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def row_of(module: str, table: dict[str, set[str]] | set[str]) -> str | None:
    """The table's entry for a module: its own, or else its sub-package's."""
    parts = module.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((name for name in names if name in table), None)


def target_of(name: str) -> str:
    """The project's module that `kerasmgpu.x.y` means."""
    inner = name.removeprefix("kerasmgpu").strip(".")
    known = row_of(inner, ALLOWED)
    return known or "public"


def complaints(module: str, source: str) -> list[str]:
    """What a module imports against the rules.

    Args:
        module: Name inside the package (`launch.command`), or `examples.name`.
        source: Its text.
    """
    row = row_of(module, ALLOWED)
    if row is None:
        return [f"{module}: not in the table of {Path(__file__).name}; add a row"]
    found = []
    for one in imports_of(source):
        where = f"{module}, line {one.line}: imports {one.name}"
        if one.name.startswith("."):
            found.append(f"{where}; imports are absolute here")
        elif is_within(one.name, "kerasmgpu"):
            target = target_of(one.name)
            if module.startswith("examples.") and target in (
                *("callbacks", "layers", "errors", "public"),
            ):
                continue
            if target == "perf.rivals":
                found.append(f"{where}; programs are imported by no module")
            free = row in FREE_INSIDE_FUNCTIONS and one.inside_function
            same = target.split(".")[0] == row.split(".")[0]
            bare = one.name in ("kerasmgpu", "kerasmgpu.__version__")
            if not (free or same or bare or target in ALLOWED[row]):
                found.append(f"{where}; allowed: {sorted(ALLOWED[row])}")
        for forbidden in FORBIDDEN_EVERYWHERE:
            if is_within(one.name, forbidden) and module != MEASURES_HOROVODS_KERAS:
                found.append(f"{where}; {forbidden} is never imported")
        for outside, importers in ONLY_IMPORTER.items():
            if is_within(one.name, outside) and row not in importers:
                found.append(f"{where}; only {sorted(importers)} may")
        heavy = any(is_within(one.name, package) for package in HEAVY)
        if heavy and row in WITHOUT_TENSORFLOW:
            found.append(f"{where}; {row} works without TensorFlow")
        if heavy and row == "cli" and not one.inside_function:
            found.append(f"{where}; a command imports it inside a function")
    return found


def project_files() -> list[tuple[str, Path]]:
    files = []
    for folder, prefix in (
        (ROOT / "kerasmgpu", ""),
        (ROOT / "callbacks", "callbacks."),
        (ROOT / "examples", "examples."),
    ):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            module = prefix + ".".join(parts)
            if module != "__init__":
                module = module.removesuffix(".__init__")
            files.append((module, path))
    return files


@pytest.mark.parametrize(
    ("module", "path"), project_files(), ids=[name for name, _ in project_files()]
)
def test_module_imports_only_what_it_may(module: str, path: Path) -> None:
    assert complaints(module, path.read_text()) == []


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("errors", "import kerasmgpu.topology", "allowed: []"),
        ("topology", "from kerasmgpu import collectives", "allowed: ['errors']"),
        ("state", "from .errors import X", "imports are absolute"),
        ("model", "import horovod.tensorflow as hvd", "only ['collectives', "),
        ("collectives", "import horovod.keras", "never imported"),
        ("collectives", "import horovod.tensorflow.keras as h", "never imported"),
        ("perf.rivals.x", "import horovod.tensorflow.keras as h", "never imported"),
        ("perf.x", "import kerasmgpu.perf.rivals.on_horovod", "by no module"),
        ("cli.x", "def f():\n  import kerasmgpu.perf.rivals", "by no module"),
        ("data", "from tensorflow.python import x", "never imported"),
        ("data", "from keras.src import x", "only ['keras_compat'] may"),
        ("data", "import keras\nkeras.src.trainers", "only ['keras_compat'] may"),
        ("launch.spec", "def f():\n  import tensorflow", "works without TensorFlow"),
        ("callbacks.x", "from kerasmgpu.strategy import HorovodStrategy", "allowed"),
        ("callbacks.x", "import kerasmgpu.perf.plot", "allowed"),
        ("launch.x", "import kerasmgpu\nkerasmgpu.callbacks", "allowed"),
        ("cli.run", "import keras", "inside a function"),
        ("cli.run", "import kerasmgpu.strategy", "allowed"),
        ("examples.mnist", "from kerasmgpu.data import x", "allowed"),
        ("unheard_of", "", "add a row"),
    ],
)
def test_table_finds_what_is_forbidden(
    module: str, source: str, complaint: str
) -> None:
    assert any(complaint in line for line in complaints(module, source))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("collectives", "def f():\n  import horovod.tensorflow as hvd"),
        ("cli.bench", "def main():\n  import kerasmgpu.strategy, tensorflow"),
        ("callbacks.x", "from kerasmgpu.perf.model import y"),
        ("launch.command", "from kerasmgpu.launch.spec import y"),
        ("launch.function", "import kerasmgpu\nkerasmgpu.__file__"),
        ("examples.mnist", "import kerasmgpu\nfrom kerasmgpu.callbacks import X"),
    ],
)
def test_table_lets_through_what_is_allowed(module: str, source: str) -> None:
    assert complaints(module, source) == []


def run_python(program: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_the_package_is_quick_and_has_no_side_effect() -> None:
    seconds = min(
        float(
            run_python(
                """
                import os, sys, threading, time
                before = dict(os.environ)
                start = time.perf_counter()
                import kerasmgpu
                kerasmgpu.errors, dir(kerasmgpu), kerasmgpu.__version__
                seconds = time.perf_counter() - start
                heavy = {"tensorflow", "keras", "horovod", "numpy"} & set(sys.modules)
                assert not heavy, heavy
                assert dict(os.environ) == before
                assert threading.active_count() == 1
                print(seconds)
                """
            )
        )
        for _ in range(3)
    )
    assert seconds < 0.1


def test_unknown_name_is_an_attribute_error_that_lists_the_public_ones() -> None:
    import kerasmgpu

    with pytest.raises(AttributeError, match="public names are HorovodStrategy, call"):
        kerasmgpu.HorovodStrtegy  # noqa: B018


def test_every_public_name_can_be_loaded() -> None:
    import kerasmgpu

    for name in kerasmgpu.__all__:
        assert getattr(kerasmgpu, name) is not None
    assert set(kerasmgpu.__all__) <= set(dir(kerasmgpu))
