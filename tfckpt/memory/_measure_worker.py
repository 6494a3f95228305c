"""Runs one function and writes its result as JSON.

`process.measure_in_process` runs this file in a process of its own.

Usage: python _measure_worker.py REQUEST, which is JSON: the target as
"module:function" or "file.py:function", its arguments, the module search
path, and the file for the answer.
"""

import functools
import importlib
import importlib.util
import json
import sys


def _load(place):
    """Imports a module by its name or its file."""
    if not place.endswith(".py"):
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location("measured", place)
    module = importlib.util.module_from_spec(spec)
    sys.modules["measured"] = module
    spec.loader.exec_module(module)
    return module


def main(text):
    """Answers the request in `text`."""
    request = json.loads(text)
    # Replaces this file's own folder, too.
    sys.path[:] = request["path"]
    place, _, name = request["target"].rpartition(":")
    function = functools.reduce(getattr, name.split("."), _load(place))
    answer = json.dumps(function(*request["arguments"]))
    with open(request["answer"], "w", encoding="utf-8") as file:
        file.write(answer)


if __name__ == "__main__":
    main(sys.argv[1])
