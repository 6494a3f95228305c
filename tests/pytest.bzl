"""A rule for files of tests that pytest runs."""

load("@rules_python//python:defs.bzl", "py_test")

def pytest_test(name, deps = [], data = [], **kwargs):
    """A `py_test` of the file `<name>.py` that is run by pytest.

    Args:
      name: Name of the target, and of the file without its ending.
      deps: What the file imports; conftest and pytest are added.
      data: Files that it reads; the settings of pytest are added.
      **kwargs: Handed on to `py_test`.
    """
    always = [":conftest", "@pypi//pytest"]
    py_test(
        name = name,
        srcs = [name + ".py", "pytest_main.py"],
        args = ["$(rootpath " + name + ".py)"],
        data = data + [name + ".py", "//:pyproject.toml"],
        main = "pytest_main.py",
        deps = deps + [dep for dep in always if dep not in deps],
        **kwargs
    )
