"""Reads what the Python files of this repository import.

`tools/build_files.py` writes the dependencies of BUILD files from it,
`tests/build_test.py` and `tests/imports_test.py` hold the repository to it.
"""

import ast
import dataclasses
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("benchmarks", "examples", "tests", "tfckpt", "tools")


@dataclasses.dataclass(frozen=True)
class Import:
    """A name that a file imports, wherever in the file it does.

    Attributes:
      name: Dotted name, `a.b` for `import a.b` and for `from a import b`.
      explicit: The part of `name` that is a module for sure, `a` for
        `from a import b`, where `b` may be a module or something in it.
      line: Line of the statement.
    """

    name: str
    explicit: str
    line: int


def python_files() -> list[pathlib.Path]:
    """The Python files of the repository, relative to its root."""
    return sorted(
        path.relative_to(ROOT)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
    )


def module_name(path: pathlib.Path) -> str:
    """The dotted module name of a file given relative to the root.

    Example:

    >>> module_name(pathlib.Path("tfckpt/memory/__init__.py"))
    'tfckpt.memory'
    """
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: pathlib.Path) -> list[Import]:
    """All imports of a file, those inside functions included.

    Args:
      path: File relative to the root.

    Raises:
      ValueError: At a relative import; modules are imported by full names.
    """
    found = []
    tree = ast.parse((ROOT / path).read_text("utf-8"), str(path))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [
                Import(alias.name, alias.name, node.lineno)
                for alias in node.names
            ]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(
                    f"{path}:{node.lineno} imports relatively; write the "
                    "full name of the module."
                )
            found += [
                Import(f"{node.module}.{alias.name}", node.module, node.lineno)
                for alias in node.names
            ]
    return found


def local_file(name: str, importer: pathlib.Path) -> pathlib.Path | None:
    """The file of this repository that an import of `name` reads, or None.

    Args:
      name: Dotted name; `a.b` may be a name `b` in the module `a`.
      importer: File that imports it. What lies beside a program can be
        imported by its plain name, and so can programs and helpers in tests.
    """
    parts = name.split(".")
    if parts[0] in FOLDERS:
        roots = [pathlib.Path()]
    else:
        roots = [importer.parent]
        if importer.parts[0] == "tests":
            roots += [pathlib.Path(each) for each in ("benchmarks", "examples")]
        if importer.parts[0] == "tfckpt":
            roots = []
    for root in roots:
        for length in (len(parts), len(parts) - 1):
            base = root.joinpath(*parts[:length])
            for path in (base.with_suffix(".py"), base / "__init__.py"):
                if length and (ROOT / path).is_file():
                    return path
    return None


def third_party(name: str) -> str | None:
    """The top-level package of an import from outside, None in Python's own."""
    top = name.partition(".")[0]
    return None if top in sys.stdlib_module_names else top
