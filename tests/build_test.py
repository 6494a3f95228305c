"""The BUILD files agree with the Python files and what they import."""

import collections
import pathlib

import pytest

from tools import build_files, imports

_TARGETS = [
    target
    for build in build_files.build_paths()
    for target in build_files.read_targets(build)
]
_RUN = "run tools/build_files.py"


def _label(target):
    name = target.attributes["name"]
    folder = target.build.parent
    short = f"//{folder.as_posix()}"
    return short if folder.name == name else f"{short}:{name}"


def test_every_python_file_is_in_exactly_one_target():
    counts = collections.Counter(
        path for target in _TARGETS for path in target.python_files
    )
    files = {
        path for path in imports.python_files() if path.parent != pathlib.Path()
    }
    assert counts.keys() == files, _RUN
    assert {path: n for path, n in counts.items() if n != 1} == {}


def test_names_follow_the_files():
    # What depends on a file finds its target by the file's name.
    for target in _TARGETS:
        if target.python_files:
            (path,) = target.python_files
            assert _label(target) == build_files.label(path)


@pytest.mark.parametrize(
    "target", [each for each in _TARGETS if each.python_files], ids=_label
)
def test_dependencies_are_the_imports(target):
    (path,) = target.python_files
    stated = target.attributes.get("deps", [])
    assert stated == build_files.expected_deps(path), _RUN


def test_data_of_the_package_belongs_to_a_target():
    stated = {
        target.build.parent / name
        for target in _TARGETS
        for name in target.attributes.get("data", [])
    }
    found = {
        path.relative_to(imports.ROOT)
        for path in (imports.ROOT / "tfckpt").rglob("*")
        if path.is_file()
        and path.suffix not in (".py", ".pyc")
        and path.name != "BUILD"
    }
    assert found <= stated


def test_every_file_is_up_to_date():
    # Sorted, and nothing left of deleted files.
    for build in build_files.build_paths()[1:]:
        text = (imports.ROOT / build).read_text("utf-8")
        assert text == build_files.updated(build), _RUN


@pytest.mark.parametrize(
    ("importer", "name", "expected"),
    [
        ("tests/x_test.py", "tools.imports", "tools/imports.py"),
        ("tests/x_test.py", "tools.imports.ROOT", "tools/imports.py"),
        ("tests/x_test.py", "imports", None),
        ("tools/x.py", "imports", "tools/imports.py"),
        ("tfckpt/x.py", "imports", None),
        ("tfckpt/x.py", "tfckpt.unknown", "tfckpt/__init__.py"),
        ("tfckpt/x.py", "numpy.linalg", None),
    ],
)
def test_local_file(importer, name, expected):
    found = imports.local_file(name, pathlib.Path(importer))
    assert found == (expected and pathlib.Path(expected))


def test_imports_inside_functions_count(tmp_path, monkeypatch):
    (tmp_path / "m.py").write_text(
        "import a.b\ndef f():\n    from c import d as e\n"
    )
    monkeypatch.setattr(imports, "ROOT", tmp_path)
    assert imports.imports_of(pathlib.Path("m.py")) == [
        imports.Import("a.b", "a.b", 1),
        imports.Import("c.d", "c", 3),
    ]


def test_relative_imports_are_refused(tmp_path, monkeypatch):
    (tmp_path / "m.py").write_text("\nfrom . import n\n")
    monkeypatch.setattr(imports, "ROOT", tmp_path)
    with pytest.raises(ValueError, match="m.py:2 imports relatively"):
        imports.imports_of(pathlib.Path("m.py"))


def test_a_changed_import_changes_the_target(tmp_path, monkeypatch):
    monkeypatch.setattr(imports, "ROOT", tmp_path)
    folder = tmp_path / "tools"
    folder.mkdir()
    (folder / "a.py").write_text("import numpy\n")
    (folder / "b.py").write_text("from tools import a\n")
    build = pathlib.Path("tools/BUILD")
    (tmp_path / build).write_text(build_files.updated(build))
    first = build_files.read_targets(build)
    assert [t.attributes["deps"] for t in first] == [["@pypi//numpy"], [":a"]]

    text = (tmp_path / build).read_text()
    (tmp_path / build).write_text(
        text.replace('srcs = ["b.py"]', 'srcs = ["b.py"],\n    data = ["d"]')
    )
    (folder / "a.py").unlink()
    (folder / "b.py").write_text("import sklearn\nimport os\n")
    (tmp_path / build).write_text(build_files.updated(build))
    (second,) = build_files.read_targets(build)
    assert second.attributes == {
        "name": "b",
        "srcs": ["b.py"],
        "data": ["d"],
        "deps": ["@pypi//scikit_learn"],
    }
