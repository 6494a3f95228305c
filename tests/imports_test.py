"""Imports go one way, and private names stay in their modules."""

import ast
import pathlib
import re

import pytest

from tools import imports

# What each room of the package may import from the others. Read from top to
# bottom it is a way to learn the package: nothing needs what comes below it.
# A room is a module or, where it grew, a folder of modules.
_ROOMS = {
    "_compat": set(),
    "_compat_graph": set(),
    "_compat_training": set(),
    "units": set(),
    "recomputation": {"_compat"},
    "layers": {"_compat", "recomputation"},
    "memory": {"_compat"},
    "devices": {"memory", "units"},
    # Sums over micro-batches and replicas.
    "replica_variables": {"_compat_training"},
    "accumulated_gradients": {"replica_variables"},
    "accumulation": {"_compat_training", "accumulated_gradients"},
    "tpu_address": set(),
    "distribute": {"_compat_training", "tpu_address"},
    # Plain data and algorithms.
    "costs": set(),
    "fields": set(),
    "prediction": {"fields"},
    "plan": {"fields", "prediction"},
    "simulator": {"costs", "plan", "prediction"},
    "planners": {"costs", "plan", "simulator", "units"},
    # A Keras model, read and cut.
    "flattening": {"_compat_graph"},
    "graph": {"_compat_graph", "flattening"},
    "sizes": {"_compat_graph", "graph"},
    "segments": {"_compat_graph", "graph", "plan", "recomputation"},
    "segmentation": {"graph", "plan", "planners", "segments", "sizes"},
    "conversion": {"_compat_graph"},
    # One update from many micro-batches.
    "normalization": {
        "_compat_training",
        "graph",
        "recomputation",
        "replica_variables",
    },
    "training": {
        "_compat",
        "_compat_graph",
        "_compat_training",
        "accumulated_gradients",
        "distribute",
        "graph",
        "normalization",
        "recomputation",
        "replica_variables",
        "segments",
    },
    "segmented_model": {
        "_compat_graph",
        "conversion",
        "graph",
        "plan",
        "segmentation",
        "segments",
        "training",
    },
    # What a step will take, and does.
    "cost": {
        "_compat_graph",
        "costs",
        "graph",
        "plan",
        "recomputation",
        "sizes",
    },
    "target_fit": {
        "memory",
        "plan",
        "planners",
        "prediction",
        "segmented_model",
        "simulator",
        "units",
    },
    "planning": {
        "_compat_graph",
        "conversion",
        "cost",
        "costs",
        "graph",
        "memory",
        "plan",
        "planners",
        "segmentation",
        "simulator",
        "target_fit",
        "units",
    },
    "tables": {"plan", "prediction", "units"},
    "report": {"plan", "tables", "units"},
    "drawing": {"plan"},
    "measured_step": {"memory", "plan", "segmented_model"},
    "measurement": {
        "measured_step",
        "memory",
        "plan",
        "prediction",
        "report",
        "tables",
        "units",
    },
    "cli": {
        "devices",
        "drawing",
        "measurement",
        "memory",
        "plan",
        "planning",
        "prediction",
        "report",
        "segmented_model",
        "tables",
        "target_fit",
        "units",
    },
    "__main__": {"cli", "memory"},
}
# Where private names of others may be imported. Compiling for a device that is
# not there has no public way in JAX; the worker runs in a process of its own
# and imports nothing of ours. XLA's own plan can be asked for, but the format
# that it comes in has no public name.
_PRIVATE = {
    pathlib.Path("tfckpt/_compat.py"): ("keras", "tensorflow"),
    pathlib.Path("tfckpt/_compat_graph.py"): ("keras",),
    pathlib.Path("tfckpt/_compat_training.py"): ("keras",),
    pathlib.Path("tfckpt/memory/_compile_worker.py"): ("jax", "jaxlib"),
}
_FILES = [path for path in imports.python_files() if path.parts[0] == "tfckpt"]


def _room(path):
    return path.parts[1].removesuffix(".py")


def _requirements(text):
    return {
        re.split(r"[>=<\[]", each)[0].replace("-", "_").lower()
        for each in ast.literal_eval(text)
    }


def test_every_room_is_in_the_table():
    rooms = {_room(path) for path in _FILES} - {"__init__"}
    assert rooms == _ROOMS.keys()


def test_the_table_has_no_circle():
    above = set()
    for room, allowed in _ROOMS.items():
        assert allowed <= above, f"{room} needs what comes below it"
        above.add(room)


@pytest.mark.parametrize("path", _FILES, ids=str)
def test_rooms_import_as_the_table_says(path):
    room = _room(path)
    if room == "__init__":
        return
    for each in imports.imports_of(path):
        local = imports.local_file(each.name, path)
        if local is not None and _room(local) != room:
            assert _room(local) in _ROOMS[room], f"{path}:{each.line}"


def test_modules_import_each_other_in_no_circle():
    graph = {
        path: {
            local
            for each in imports.imports_of(path)
            if (local := imports.local_file(each.name, path))
            and local not in (path, pathlib.Path("tfckpt/__init__.py"))
        }
        for path in _FILES
    }
    while graph:
        free = {path for path, needs in graph.items() if not needs & set(graph)}
        assert free, f"These import each other: {sorted(map(str, graph))}"
        graph = {path: graph[path] for path in graph.keys() - free}


def test_modules_are_imported_not_names():
    for path in _FILES:
        for each in imports.imports_of(path):
            local = imports.local_file(each.name, path)
            if local and path.name != "__init__.py":
                assert imports.module_name(local) == each.name, (
                    f"{path}:{each.line} imports {each.name}, which is no "
                    "module"
                )


def test_private_names_of_others_are_imported_in_few_places():
    for path in _FILES:
        for each in imports.imports_of(path):
            top, *rest = each.explicit.split(".")
            private = (
                (top == "tensorflow" and rest)
                or (top == "keras" and rest[:1] == ["src"])
                or any(part.startswith("_") for part in rest)
            )
            if private and not imports.local_file(each.name, path):
                assert top in _PRIVATE.get(path, ()), f"{path}:{each.line}"


def test_nothing_calls_recompute_grad():
    """The engine's docstring says why."""
    for path in _FILES:
        tree = ast.parse((imports.ROOT / path).read_text("utf-8"))
        used = any(
            isinstance(node, ast.Attribute) and node.attr == "recompute_grad"
            for node in ast.walk(tree)
        )
        assert not used, path


def test_plans_need_numpy_only():
    for path in _FILES:
        if _room(path) in (
            "costs",
            "plan",
            "planners",
            "prediction",
            "simulator",
        ):
            for each in imports.imports_of(path):
                assert imports.third_party(each.name) in (
                    None,
                    "numpy",
                    "tfckpt",
                ), f"{path}:{each.line}"


def test_what_is_imported_at_once_is_a_run_time_dependency():
    # The rest belongs to an extra and is imported where it is used.
    setup = (imports.ROOT / "setup.py").read_text("utf-8")
    stated = re.search(r"install_requires=(\[.*?\])", setup, re.DOTALL)[1]
    known = _requirements(stated) | {"absl", "tfckpt"}
    for path in _FILES:
        tree = ast.parse((imports.ROOT / path).read_text("utf-8"))
        at_once = {
            node.lineno
            for node in tree.body
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        for each in imports.imports_of(path):
            outside = imports.third_party(each.name)
            if each.line in at_once and outside:
                assert outside in known, f"{path}:{each.line}"
