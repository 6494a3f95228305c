"""Every code fence, command and figure of the documents holds.

What can be run is run: the ```python fences of a document, one after another
in one namespace, in an empty folder. A fence that shows only the interesting
lines finds the rest in a comment before it, which readers do not see:

    <!-- setup
    import keras
    model = keras.Sequential([keras.layers.Dense(1)])
    -->

A ```diff fence is run as it reads afterwards. Commands are not run (they
install, or take minutes): their programs, flags and extras have to exist.
"""

import ast
import dataclasses
import pathlib
import re
import shlex

import pytest

from tfckpt import __main__ as command_line
from tools import imports

ROOT = imports.ROOT
_DOCUMENTS = [
    *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
# Where somebody might read a number and believe it.
_CLAIMS = [each for each in _DOCUMENTS if each.name == "README.md"] + [
    each for each in _DOCUMENTS if each.parent != ROOT
]
_PROGRAMS = sorted(
    path.relative_to(ROOT)
    for folder in ("benchmarks", "examples")
    for path in (ROOT / folder).glob("*.py")
    if 'if __name__ == "__main__"' in path.read_text("utf-8")
)
_FIGURE = re.compile(
    r"(?<![\w.])\d+(?:\.\d+)?\s?"
    r"(?:[KMG]i?B|kB|%|ms|s|seconds?|minutes?|times|\u00d7)(?!\w)"
)


@dataclasses.dataclass
class Fence:
    """A code fence, or a hidden comment with code.

    Attributes:
      language: What stands after the opening backquotes, or "setup".
      text: The lines inside.
      line: Line of the first of them, from 1.
    """

    language: str
    text: str
    line: int


def fences_of(text):
    """The fences of a document and its text without them."""
    found, rest, opened = [], [], None
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if opened is None:
            if match := re.match(r"(`{3,})(\w*)$", stripped):
                opened = (match[1], Fence(match[2], "", number + 1))
            elif stripped == "<!-- setup":
                opened = ("-->", Fence("setup", "", number + 1))
            else:
                rest.append(line)
                continue
            indent = len(line) - len(line.lstrip())
        elif stripped == opened[0]:
            found.append(opened[1])
            opened = None
        else:
            opened[1].text += line[indent:] + "\n"
        rest.append("")
    assert opened is None, f"The fence of line {opened[1].line} is not closed."
    return found, "\n".join(rest)


def python_of(fence):
    """The Python code that a fence stands for, "" if none."""
    if fence.language in ("python", "setup"):
        return fence.text
    if fence.language == "diff":
        return "".join(
            line[1:]
            for line in fence.text.splitlines(keepends=True)
            if not line.startswith("-")
        )
    return ""


def commands_of(text):
    """The commands of a shell fence or an inline code span, as words."""
    for line in text.replace("\\\n", " ").splitlines():
        line = re.sub(r"\s#\s.*", "", line.strip().removeprefix("$ "))
        if line and not line.startswith("#"):
            for command in re.split(r"&&|\|\||;|\|", line):
                words = shlex.split(command)
                while words and re.match(r"[A-Z_]+=", words[0]):
                    words = words[1:]
                if words:
                    yield words


def _flags_of(program):
    """The flags that a program and its neighbours define."""
    known, queue, seen = {"help", "helpfull"}, [program], set()
    while queue:
        path = queue.pop()
        if path in seen:
            continue
        seen.add(path)
        for each in imports.imports_of(path):
            local = imports.local_file(each.name, path)
            if local and local.is_relative_to(program.parent):
                queue.append(local)
        for node in ast.walk(ast.parse((ROOT / path).read_text("utf-8"))):
            if isinstance(node, ast.Tuple) and node.elts:
                # Flags that are defined in a loop over their names.
                first = node.elts[0]
                if isinstance(first, ast.Constant):
                    known.add(str(first.value))
            name = isinstance(node, ast.Call) and getattr(
                node.func, "attr", getattr(node.func, "id", "")
            )
            if name and (name.startswith("DEFINE_") or name == "add_argument"):
                known |= {
                    arg.value.lstrip("-")
                    for arg in node.args[:2]
                    if isinstance(arg, ast.Constant)
                    and isinstance(arg.value, str)
                }
    return known


def _check_command(name=None, *arguments):
    """For the command line of the package, which has flags by command."""
    if name is None:
        return
    assert name in command_line.COMMANDS, f"tfckpt has no command {name}."
    known = command_line.COMMANDS[name].flags
    for argument in arguments:
        if argument.startswith("--"):
            flag = argument[2:].partition("=")[0]
            assert flag in known, f"{name} has no flag --{flag}"


def _check_program(program, arguments):
    assert (ROOT / program).is_file(), f"There is no {program}."
    known = _flags_of(program)
    for argument in arguments:
        if argument.startswith("--"):
            name = argument[2:].partition("=")[0]
            assert name in known or name.removeprefix("no") in known, (
                f"{program} has no flag --{name}"
            )


def _check_pip(arguments):
    setup = (ROOT / "setup.py").read_text("utf-8")
    stated = setup[setup.index("extras_require") :]
    for extra in re.findall(r"\[([\w,]+)\]", " ".join(arguments)):
        for each in extra.split(","):
            assert f'"{each}": ' in stated, f"There is no extra [{each}]."


def check_command(words):
    """Fails unless what a command names exists."""
    program, *arguments = words
    name = pathlib.PurePath(program).name
    if program in ("cd", "git"):
        return
    if program.startswith(("./", "tools/", ".ci/")):
        path = ROOT / program
        assert path.is_file(), f"There is no {program}."
        assert path.stat().st_mode & 0o111, f"{program} is not executable."
        text = path.read_text("utf-8")
        for argument in arguments:
            assert argument in text, f"{program} knows no {argument}."
        return
    if re.fullmatch(r"python[\d.]*", name):
        if arguments[0] != "-m":
            _check_program(pathlib.Path(arguments[0]), arguments[1:])
            return
        name, *arguments = arguments[1:]
    if name == "tfckpt":
        _check_command(*arguments)
    elif name == "pip":
        _check_pip(arguments)
    elif name in ("pytest", "ruff"):
        for argument in arguments:
            if "/" in argument or argument.endswith(".py"):
                path = argument.partition("::")[0]
                assert (ROOT / path).exists(), f"There is no {path}."
    else:
        assert name == "venv", f"Teach this test to check {shlex.join(words)}"


def is_command(span):
    """Whether an inline code span is a command that a reader may type."""
    return bool(
        re.match(r"(\S*python3? |\S*pip3? |tools/|\.ci/|pytest |ruff )", span)
    )


def sections_of(text):
    """The text split at the headings outside of its fences."""
    sections, fenced = [[]], False
    for line in text.splitlines():
        fenced ^= line.lstrip().startswith(("```", "<!-- setup", "-->"))
        if line.startswith("#") and not fenced:
            sections.append([])
        sections[-1].append(line)
    return ["\n".join(lines) for lines in sections]


@pytest.fixture(params=_DOCUMENTS, ids=lambda path: path.name)
def document(request):
    """The text of each document."""
    assert request.param.is_file()
    return request.param.read_text("utf-8")


@pytest.mark.parametrize("path", _DOCUMENTS, ids=lambda path: path.name)
def test_python_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for fence in fences_of(path.read_text("utf-8"))[0]:
        # So that a traceback shows the line of the document.
        code = "\n" * (fence.line - 1) + python_of(fence)
        exec(compile(code, str(path), "exec"), namespace)


def test_fences_are_of_a_known_kind(document):
    for fence in fences_of(document)[0]:
        known = {"bash", "diff", "python", "setup", "text"}
        assert fence.language in known, f"line {fence.line}"


def test_nothing_is_left_to_fill_in(document):
    assert not re.search(r"@[A-Z]+@", document)


def test_commands_exist(document):
    fences, rest = fences_of(document)
    texts = [fence.text for fence in fences if fence.language == "bash"]
    texts += filter(is_command, re.findall(r"`([^`]+)`", rest))
    for text in texts:
        for words in commands_of(text):
            check_command(words)


@pytest.mark.parametrize("path", _CLAIMS, ids=lambda path: path.name)
def test_figures_name_their_command(path):
    # In the same section, so that a table needs it only once.
    for section in sections_of(path.read_text("utf-8")):
        fences, rest = fences_of(section)
        claims = rest + "".join(
            fence.text for fence in fences if fence.language == "text"
        )
        figures = _FIGURE.findall(re.sub(r"`[^`]*`", "", claims))
        commands = [fence.text for fence in fences if fence.language == "bash"]
        commands += filter(is_command, re.findall(r"`([^`]+)`", rest))
        named = any(str(each) in "".join(commands) for each in _PROGRAMS)
        assert named or not figures, (
            f"No program of benchmarks/ or examples/ measures {figures}:\n"
            f"{section}"
        )


def test_every_program_is_named():
    readme = (ROOT / "README.md").read_text("utf-8")
    assert [path for path in _PROGRAMS if str(path) not in readme] == []


@pytest.mark.parametrize("path", _DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    _, rest = fences_of(path.read_text("utf-8"))
    for target in re.findall(r"\]\(([^)#\s]+)", rest):
        if not re.match(r"https?:|mailto:", target):
            assert (path.parent / target).exists(), target


def test_reading_of_a_document():
    text = (
        "# A\n<!-- setup\nx = 1\n-->\n```python\ny = x\n```\n1 GiB\n"
        "```diff\n-y = 2\n+y = 3\n z = y\n```\n## B\n"
    )
    fences, rest = fences_of(text)
    assert [(each.language, each.line) for each in fences] == [
        ("setup", 3),
        ("python", 6),
        ("diff", 10),
    ]
    assert [python_of(each) for each in fences] == [
        "x = 1\n",
        "y = x\n",
        "y = 3\nz = y\n",
    ]
    assert rest.split() == ["#", "A", "1", "GiB", "##", "B"]
    assert len(sections_of(text)) == 3


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("python examples/none.py", "no examples/none.py"),
        ("python tools/build_files.py --some=1", "no flag --some"),
        ("A=1 .venv/bin/pip install '.[none]'", r"no extra \[none\]"),
        ("cd a && tools/none.sh", "no tools/none.sh"),
        ("tools/test.sh --none", "knows no --none"),
        ("python -m tfckpt paln ResNet50", "no command paln"),
        ("tfckpt plan ResNet50 --color=1", "plan has no flag --color"),
        ("pytest tests/none_test.py::x", "no tests/none_test.py"),
        ("curl x", "Teach this test"),
    ],
)
def test_wrong_commands_are_found(command, message):
    with pytest.raises(AssertionError, match=message):
        for words in commands_of(command):
            check_command(words)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("takes 1.3 times as long", True),
        ("saves 70 % at 2.5 GiB", True),
        ("61.4 MiB", True),
        ("in 5 minutes", True),
        ("Keras 3 and Python 3.11", False),
        ("36 layers of 2 segments", False),
    ],
)
def test_figures_are_recognized(text, expected):
    assert bool(_FIGURE.search(text)) == expected
