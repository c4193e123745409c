"""Keras callbacks for jobs of many ranks; imported as `kerasmgpu.callbacks`.

Each works in any order in the list, with any number of ranks (one included), and is
passed to `fit` on every rank.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kerasmgpu.callbacks.backup_and_restore import BackupAndRestore
    from kerasmgpu.callbacks.consistency_check import ConsistencyCheck
    from kerasmgpu.callbacks.learning_rate_scaling import LearningRateScaling
    from kerasmgpu.callbacks.rank_zero import RankZero
    from kerasmgpu.callbacks.rank_zero_checkpoint import RankZeroCheckpoint
    from kerasmgpu.callbacks.speedup_logger import SpeedupLogger
    from kerasmgpu.callbacks.terminate_on_nan import TerminateOnNaN

__all__ = [
    "BackupAndRestore",
    "ConsistencyCheck",
    "LearningRateScaling",
    "RankZero",
    "RankZeroCheckpoint",
    "SpeedupLogger",
    "TerminateOnNaN",
]

_MODULES = {
    "BackupAndRestore": "backup_and_restore",
    "ConsistencyCheck": "consistency_check",
    "LearningRateScaling": "learning_rate_scaling",
    "RankZero": "rank_zero",
    "RankZeroCheckpoint": "rank_zero_checkpoint",
    "SpeedupLogger": "speedup_logger",
    "TerminateOnNaN": "terminate_on_nan",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; "
            f"its callbacks are {', '.join(__all__)}"
        )
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
