"""The public names: written down, documented, and their examples run."""

import doctest
import importlib
import inspect
import os
import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tools import imports

# Whoever adds or takes away a public name says so here and in CHANGELOG.md.
PUBLIC = [
    "AccumulatingTrainer",
    "Callback",
    "GradientAccumulator",
    "Plan",
    "PlanError",
    "Recompute",
    "RecomputeError",
    "ResumeTraining",
    "SegmentedModel",
    "cost",
    "distribute",
    "is_recomputing",
    "keep",
    "make_plan",
    "memory",
    "no_recompute",
    "planners",
    "recompute",
]
# Programs and workers do their work when they are imported.
_MODULES = [
    imports.module_name(path)
    for path in imports.python_files()
    if path.parts[0] in ("tfckpt", "tools") and path.name != "__main__.py"
]


def test_public_names_are_the_written_ones():
    assert sorted(tfckpt.__all__) == PUBLIC
    assert len(set(tfckpt.__all__)) == len(tfckpt.__all__)


def test_no_other_name_looks_public():
    others = {
        name
        for name, value in vars(tfckpt).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert others <= set(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name):
    value = getattr(tfckpt, name)
    assert inspect.getdoc(value)
    if inspect.isclass(value):
        # A class that has no docstring would inherit one.
        assert value.__doc__
        for member, method in vars(value).items():
            if not member.startswith("_") and callable(method):
                assert inspect.getdoc(getattr(value, member)), member
    if not inspect.ismodule(value) and not (
        inspect.isclass(value) and issubclass(value, Exception)
    ):
        assert ">>> " in inspect.getdoc(value), "An example is missing."


@pytest.mark.parametrize("name", _MODULES)
def test_examples_in_docstrings_run(name):
    module = importlib.import_module(name)
    # The names that the field, and the documents here, give to modules.
    usual = {"keras": keras, "np": np, "tf": tf, "tfckpt": tfckpt}
    failed, _ = doctest.testmod(
        module,
        extraglobs=usual,
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE,
    )
    assert failed == 0


@pytest.mark.parametrize("name", _MODULES)
def test_docstrings_have_no_code_that_does_not_run(name):
    source = pathlib.Path(importlib.import_module(name).__file__).read_text()
    assert "```" not in source, "Examples begin with >>>, so that they run."


def _import_with(backend):
    return subprocess.run(
        [sys.executable, "-c", "import tfckpt"],
        cwd=imports.ROOT,
        env={**os.environ, "KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("backend", ["jax", "numpy"])
def test_another_backend_is_one_clear_error(backend):
    if backend == "jax":
        pytest.importorskip("jax")
    run = _import_with(backend)
    assert run.returncode != 0
    # One error, and its message is the last line.
    assert run.stderr.count("Traceback") == 1, run.stderr
    message = run.stderr.strip().splitlines()[-1]
    for part in (backend, "KERAS_BACKEND", "tensorflow", "tfckpt"):
        assert part in message


def test_version_is_the_one_of_the_changelog_and_of_bazel():
    changelog = (imports.ROOT / "CHANGELOG.md").read_text("utf-8")
    assert re.search(r"^## (\S+)", changelog, re.M)[1] == tfckpt.__version__
    bazel = (imports.ROOT / "MODULE.bazel").read_text("utf-8")
    assert re.search(r'    version = "(.+)"', bazel)[1] == tfckpt.__version__


@pytest.mark.parametrize("name", PUBLIC)
def test_the_changelog_names_what_is_public(name):
    changelog = (imports.ROOT / "CHANGELOG.md").read_text("utf-8")
    assert re.search(rf"`(tfckpt\.)?{name}\b", changelog)
