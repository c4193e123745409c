"""The `kerasmgpu` command: one subcommand a file, imported when it is chosen.

A subcommand is a module of this package with `HELP` (one line),
`add_arguments(parser)` and `main(args)`, which returns the exit code. The command's
name is the module's, with dashes for underscores.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from types import ModuleType

from kerasmgpu.errors import KerasMGPUError


def command_names() -> list[str]:
    """Names of all subcommands, sorted.

    Returns:
        The names as they are typed, such as `"install-horovod"`.
    """
    modules = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(
        name.replace("_", "-") for name in modules if not name.startswith("_")
    )


def _load(command: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{command.replace('-', '_')}")


def _overview() -> str:
    names = command_names()
    width = max(map(len, names))
    lines = (f"  {name:<{width}}  {_load(name).HELP}" for name in names)
    return (
        "usage: kerasmgpu [--version] COMMAND ...\n\n"
        "Train Keras 3 models on many processes and machines.\n\ncommands:\n"
        + "\n".join(lines)
        + "\n\n`kerasmgpu COMMAND --help` shows a command's options.\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `kerasmgpu` command.

    Args:
        argv: The arguments without the program's name. Default: `sys.argv[1:]`.

    Returns:
        The exit code: 0 for success, 1 for an error, 2 for a wrong command line,
        130 after Ctrl-C, or what the subcommand returns.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview(), end="", file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    command, *rest = arguments
    if command == "--version":
        from kerasmgpu import __version__

        print(f"kerasmgpu {__version__}")
        return 0
    if command not in command_names():
        print(
            f"kerasmgpu: no command {command!r}; expected one of "
            f"{', '.join(command_names())}",
            file=sys.stderr,
        )
        return 2
    module = _load(command)
    parser = argparse.ArgumentParser(
        prog=f"kerasmgpu {command}", description=module.HELP
    )
    module.add_arguments(parser)
    try:
        return int(module.main(parser.parse_args(rest)))
    except KerasMGPUError as error:
        if os.environ.get("KERASMGPU_DEBUG") == "1":
            raise
        print(f"kerasmgpu {command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
