"""The files of a backup: two generations, each whole and with a checksum."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import pickle
import shutil
import warnings
from typing import Any, BinaryIO

from kerasmgpu.errors import InvalidArgumentError
from kerasmgpu.files import replaced

_MAGIC = b"kerasmgpu backup 1\n"
_DIGEST_BYTES = 32
_GENERATIONS = 2
_CHUNK_BYTES = 1 << 20


class BackupFolder:
    """Reads and writes the states of one run; used on rank 0 only.

    A file is a head line, a pickle, and the SHA-256 of both. Like any pickle it is to
    be read only by those who trust who wrote it.

    Args:
        path: the folder.
    """

    def __init__(self, path: Any) -> None:
        self.path = pathlib.Path(path)

    def prepare(self) -> None:
        """Makes the folder, and removes what a killed process left half written."""
        self.path.mkdir(parents=True, exist_ok=True)
        if not os.access(self.path, os.W_OK):
            raise PermissionError(f"{str(self.path)!r} cannot be written to.")
        for path in self.path.glob(".state-*"):
            shutil.rmtree(path, ignore_errors=True)

    def generations(self) -> list[pathlib.Path]:
        """The files that are there, the newest first."""
        return sorted(self.path.glob("state-*.backup"), reverse=True)

    def load(self) -> dict[str, Any] | None:
        """The newest state that is whole, or None where the folder is empty."""
        found = self.generations()
        for path in found:
            state = _read(path)
            if state is not None:
                return state
            warnings.warn(
                f"The backup {path} is damaged: its checksum does not fit. "
                + ("Using the one before." if path is not found[-1] else ""),
                stacklevel=2,
            )
            print(f"BackupAndRestore: {path} is damaged.", flush=True)
        if found:
            raise InvalidArgumentError(
                f"All backups in {str(self.path)!r} are damaged: "
                f"{', '.join(path.name for path in found)}. Expected one with the "
                "right checksum. Delete the folder to begin anew."
            )
        return None

    def save(self, state: dict[str, Any]) -> None:
        found = self.generations()
        number = int(found[0].name[6:16]) + 1 if found else 0
        with replaced(self.path / f"state-{number:010d}.backup") as temporary:
            _write(temporary, state)
        for path in self.generations()[_GENERATIONS:]:
            path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Removes the backups, and the folder where nothing else is in it."""
        for path in self.generations():
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.rmdir()


class _Hashing:
    """A file that keeps the hash of what was written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return self._file.write(data)


def _write(path: str, state: dict[str, Any]) -> None:
    with open(path, "wb") as file:
        hashing = _Hashing(file)
        hashing.write(_MAGIC)
        pickle.dump(state, hashing, protocol=pickle.HIGHEST_PROTOCOL)
        file.write(hashing.digest.digest())


def _read(path: pathlib.Path) -> dict[str, Any] | None:
    left = path.stat().st_size - _DIGEST_BYTES
    with path.open("rb") as file:
        if left < len(_MAGIC) or file.read(len(_MAGIC)) != _MAGIC:
            return None
        digest = hashlib.sha256(_MAGIC)
        left -= len(_MAGIC)
        while left:
            data = file.read(min(left, _CHUNK_BYTES))
            digest.update(data)
            left -= len(data)
        if file.read() != digest.digest():
            return None
        file.seek(len(_MAGIC))
        return pickle.load(file)
