"""What a GPU build of Horovod needs on top: CUDA, NCCL, and two more shims.

This recipe has been compiled and linked; it was never run on a GPU.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from kerasmgpu.errors import BuildError
from kerasmgpu.horovod_environment import PythonEnvironment

_USUAL_CUDA_HOME = "/usr/local/cuda"

# With GPUs the body of xla_mpi_ops.cc is compiled: it needs what the headers that
# TensorFlow has moved and changed used to declare.
GPU_SHIMS = {
    "tensorflow/compiler/xla/client/xla_builder.h": """\
#pragma once
#include "absl/status/statusor.h"
#include "xla/hlo/builder/xla_builder.h"
namespace xla {
template <typename T>
using StatusOr = absl::StatusOr<T>;
}
""",
    "tensorflow/compiler/xla/stream_executor/stream.h": """\
#pragma once
#include <cuda_runtime.h>
#include "xla/stream_executor/stream.h"
namespace stream_executor {
namespace gpu {
inline cudaStream_t AsGpuStreamValue(Stream* stream) {
  return static_cast<cudaStream_t>(stream->platform_specific_handle().stream);
}
}  // namespace gpu
}  // namespace stream_executor
""",
}


@dataclass(frozen=True)
class GpuToolkit:
    """What a GPU build needs: CUDA's folder, NCCL's headers and its library."""

    cuda_home: Path
    nccl_include: Path
    nccl_library: Path

    def options(self) -> str:
        """Everything the build depends on, as one text."""
        return f"NCCL {self.cuda_home} {self.nccl_library.stat().st_size}"

    def include_options(self, environment: PythonEnvironment) -> list[str]:
        """Compiler options for headers that TensorFlow's own include each other by."""
        external = Path(environment.site_packages, "tensorflow/include/external")
        return [
            f"-I{external / 'highwayhash'}",
            f"-I{external / 'farmhash_archive/src'}",
        ]

    def variables(self, folder: Path) -> dict[str, str]:
        """The variables that Horovod's CMake files read; may make files in `folder`."""
        # The linker looks for libnccl.so; the PyPI package has libnccl.so.2 only.
        libraries = folder / "nccl"
        libraries.mkdir()
        (libraries / "libnccl.so").symlink_to(self.nccl_library)
        return {
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_CUDA_HOME": str(self.cuda_home),
            "HOROVOD_NCCL_INCLUDE": str(self.nccl_include),
            "HOROVOD_NCCL_LIB": str(libraries),
            "HOROVOD_NCCL_LINK": "SHARED",
        }


def find_gpu_toolkit(environment: PythonEnvironment) -> GpuToolkit:
    """Find CUDA (`CUDA_HOME`, `nvcc` on PATH, /usr/local/cuda) and PyPI's NCCL.

    Args:
        environment: The answer of `probe_python`.

    Returns:
        The folders and files found.

    Raises:
        BuildError: CUDA or NCCL is missing.
    """
    nvcc = shutil.which("nvcc")
    candidates = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parents[1]]
    homes = [Path(home) for home in [*candidates, _USUAL_CUDA_HOME] if home]
    # `nvcc` on PATH may be a wrapper that lies apart from the toolkit.
    parts = ("bin/nvcc", "include/cuda_runtime.h")
    cuda_home = next(
        (home for home in homes if all((home / part).is_file() for part in parts)), None
    )
    if cuda_home is None:
        raise BuildError(
            f"--gpu needs the CUDA toolkit; found no folder with {' and '.join(parts)} "
            f"among {', '.join(map(str, homes))}; install the toolkit (12.5 or later) "
            "and set CUDA_HOME to its folder"
        )
    nccl = Path(environment.site_packages) / "nvidia" / "nccl"
    library = nccl / "lib" / "libnccl.so.2"
    if not library.is_file() or not (nccl / "include" / "nccl.h").is_file():
        raise BuildError(
            f"--gpu needs NCCL; found no {library}; run: {environment.executable} "
            "-m pip install 'tensorflow[and-cuda]' (or nvidia-nccl-cu12)"
        )
    return GpuToolkit(cuda_home, nccl / "include", library)
