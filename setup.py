"""Packaging of tfckpt. Settings of the tools are in pyproject.toml."""

import pathlib
import re

import setuptools

_HERE = pathlib.Path(__file__).parent


def _version():
    source = (_HERE / "tfckpt" / "__init__.py").read_text("utf-8")
    return re.search(r'^__version__ = "([^"]+)"$', source, re.M)[1]


# Compiling for a device that is not there goes through names of JAX that its
# releases do not promise to keep, hence the upper bound. JAX's own extra ties
# jax-cuda12-plugin and jax-cuda12-pjrt to its version; "local" is the one
# without the CUDA libraries, which are not needed. JAX's extra for TPUs asks
# for libtpu 0.0.42, whose compiler makes a larger step of the same program (the
# chain of benchmarks/compiled_memory.py takes .15 on v5e and misses its bar of
# .13), so it is not used; the version is exact, for figures to be comparable.
_COMPILE = ["jax[cuda12-local]>=0.10.2,<0.11", "libtpu==0.0.52"]
_EXAMPLES = ["scikit-learn>=1.3"]
_PLOT = ["matplotlib>=3.7"]

setuptools.setup(
    name="tfckpt",
    version=_version(),
    description="Exact gradient checkpointing for Keras 3 on TensorFlow",
    long_description=(_HERE / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=setuptools.find_packages(include=["tfckpt", "tfckpt.*"]),
    package_data={"tfckpt.memory": ["targets/*.txtpb"]},
    python_requires=">=3.11",
    # The lower bounds are what tools/test_oldest.sh installs.
    install_requires=[
        "absl-py>=2.1",
        "keras>=3.14.1",
        "numpy>=1.26",
        "rich>=13",
        "tensorflow>=2.20",
    ],
    entry_points={"console_scripts": ["tfckpt = tfckpt.__main__:run"]},
    extras_require={
        "bench": _EXAMPLES,
        "compile": _COMPILE,
        "examples": _EXAMPLES,
        "plot": _PLOT,
        "test": [
            "hypothesis>=6.100",
            *_PLOT,
            "pytest>=8",
            "pytest-xdist>=3.6",
            # Formatting changes between minor versions.
            "ruff>=0.17,<0.18",
            # An exact programme as a bound for the planners.
            "scipy>=1.11",
        ],
    },
    classifiers=[
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
