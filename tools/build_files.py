"""Brings the BUILD files in line with the imports.

    python tools/build_files.py

adds a target for each new Python file, removes those of deleted files and
sets `deps` to what each file imports. The rest of a BUILD file is written by
hand and kept. `tests/build_test.py` fails until this was run.
"""

import ast
import dataclasses
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from tools import imports

# Where a package on PyPI has another name than the module that it brings.
_PYPI = {
    "absl": "absl_py",
    "jax_plugins": "jax_cuda12_plugin",
    "sklearn": "scikit_learn",
}
_PYTHON_RULES = ("py_binary", "py_library", "pytest_test")


@dataclasses.dataclass
class Target:
    """A call of a rule in a BUILD file.

    Attributes:
      build: The BUILD file, relative to the root.
      rule: Name of the rule.
      attributes: Its keyword arguments; a `glob` has become its files.
      first: Line where it begins, with the comment above it, from 0.
      last: Line after its last one.
    """

    build: pathlib.Path
    rule: str
    attributes: dict[str, object]
    first: int
    last: int

    @property
    def python_files(self) -> list[pathlib.Path]:
        """The Python files that the target is made of."""
        if self.rule not in _PYTHON_RULES:
            return []
        default = []
        if self.rule == "pytest_test":
            default = [f"{self.attributes['name']}.py"]
        sources = self.attributes.get("srcs", default)
        return [self.build.parent / source for source in sources]


def build_paths() -> list[pathlib.Path]:
    """The BUILD files of the repository, relative to its root."""
    paths = [pathlib.Path("BUILD")]
    for folder in imports.FOLDERS:
        paths += [
            path.relative_to(imports.ROOT)
            for path in sorted((imports.ROOT / folder).rglob("BUILD"))
        ]
    return paths


def read_targets(build: pathlib.Path) -> list[Target]:
    """The targets of a BUILD file, which is read as Python.

    Args:
      build: File relative to the root; none there means no target.
    """
    path = imports.ROOT / build
    if not path.exists():
        return []
    targets = []
    end = 0
    for node in ast.parse(path.read_text("utf-8"), str(build)).body:
        call = getattr(node, "value", None)
        last = node.end_lineno
        if isinstance(call, ast.Call):
            attributes = {
                each.arg: _value(each.value, path.parent)
                for each in call.keywords
            }
            if "name" in attributes:
                targets.append(
                    Target(
                        build, call.func.id, attributes, end, node.end_lineno
                    )
                )
        end = last
    return targets


def _value(node, folder):
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "glob"
    ):
        return sorted(
            str(path.relative_to(folder))
            for pattern in ast.literal_eval(node.args[0])
            for path in folder.glob(pattern)
        )
    return ast.literal_eval(node)


def label(path: pathlib.Path) -> str:
    """The label of the target that a Python file belongs in.

    Example:

    >>> label(pathlib.Path("tfckpt/plan.py"))
    '//tfckpt:plan'
    >>> label(pathlib.Path("tfckpt/memory/__init__.py"))
    '//tfckpt/memory'
    """
    folder = path.parent.as_posix()
    if path.name == "__init__.py":
        return f"//{folder}"
    return f"//{folder}:{path.stem}"


def expected_deps(path: pathlib.Path) -> list[str]:
    """The labels of what a Python file imports, in the order of buildifier."""
    deps = set()
    for each in imports.imports_of(path):
        local = imports.local_file(each.name, path)
        if local is not None:
            deps.add(label(local))
        elif outside := imports.third_party(each.name):
            deps.add(f"@pypi//{_PYPI.get(outside, outside)}")
    folder = f"//{path.parent.as_posix()}"
    short = [
        dep.removeprefix(folder) if dep.startswith(f"{folder}:") else dep
        for dep in deps - {label(path)}
    ]
    return sorted(short, key=lambda dep: (":/@".index(dep[0]), dep))


def _name(path):
    return path.parent.name if path.name == "__init__.py" else path.stem


def _new_target(path):
    source = (imports.ROOT / path).read_text("utf-8")
    name = _name(path)
    if path.name.endswith("_test.py"):
        return f'pytest_test(\n    name = "{name}",\n)\n'
    program = 'if __name__ == "__main__"' in source
    rule = "py_binary" if program or name == "__main__" else "py_library"
    testonly = "    testonly = True,\n" if path.parts[0] == "tests" else ""
    return (
        f'{rule}(\n    name = "{name}",\n{testonly}'
        f'    srcs = ["{path.name}"],\n)\n'
    )


def _with_deps(text, deps):
    text = re.sub(r"    deps = \[.*?\],\n", "", text, flags=re.DOTALL)
    if not deps:
        return text
    if len(deps) == 1:
        written = f'    deps = ["{deps[0]}"],\n'
    else:
        lines = "".join(f'        "{dep}",\n' for dep in deps)
        written = f"    deps = [\n{lines}    ],\n"
    head, _, tail = text.rpartition(")")
    return f"{head}{written}){tail}"


def updated(build: pathlib.Path) -> str:
    """The text that a BUILD file should have."""
    path = imports.ROOT / build
    lines = path.read_text("utf-8").splitlines(True) if path.exists() else []
    targets = read_targets(build)
    header = "".join(lines[: targets[0].first] if targets else lines)
    kept = {}
    missing = {
        path for path in imports.python_files() if path.parent == build.parent
    }
    for target in targets:
        text = "".join(lines[target.first : target.last]).strip("\n") + "\n"
        files = target.python_files
        if files:
            name = target.attributes["name"]
            if files[0] not in missing or name != _name(files[0]):
                continue
            missing.remove(files[0])
            text = _with_deps(text, expected_deps(files[0]))
        kept[target.attributes["name"]] = text
    rules = {text.partition("(")[0] for text in kept.values()}
    for file in missing:
        text = _new_target(file)
        rules.add(text.partition("(")[0])
        kept[_name(file)] = _with_deps(text, expected_deps(file))
    texts = [_header(header, rules)] + [kept[name] for name in sorted(kept)]
    return "\n".join(texts)


def _header(header, rules):
    """The lines before the first target, loading the rules that are used."""
    header = re.sub(r'load\(".*"\)\n', "", header).strip("\n")
    loads = ""
    python = sorted(rules & {"py_binary", "py_library"})
    if python:
        names = ", ".join(f'"{rule}"' for rule in python)
        loads += f'load("@rules_python//python:defs.bzl", {names})\n'
    if "pytest_test" in rules:
        loads += 'load(":pytest.bzl", "pytest_test")\n'
    header = header or 'package(default_visibility = ["//visibility:public"])'
    return f"{loads}\n{header}\n"


def main():
    """Writes every BUILD file that is to change."""
    folders = {path.parent for path in imports.python_files()}
    for build in sorted({folder / "BUILD" for folder in folders}):
        path = imports.ROOT / build
        text = updated(build)
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
            print(f"wrote {build}")


if __name__ == "__main__":
    main()
