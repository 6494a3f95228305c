#!/usr/bin/env bash
# Builds the wheel, installs it with nothing but the run-time dependencies, and
# imports every module of it outside of the checkout.
#
# VENV is the folder of the environment, PYTHON the Python that makes it.
set -euo pipefail
cd "$(dirname "$0")/.."
checkout=$PWD
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
venv=${VENV:-$scratch/venv}

"${PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/python" -m pip --quiet --disable-pip-version-check)
# A file that was deleted since the last build would come along from here.
rm -rf build
"${pip[@]}" wheel --no-deps --wheel-dir "$scratch" .
"${pip[@]}" install "$scratch"/*.whl

cd "$scratch"
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2}
"$venv/bin/python" - "$checkout" <<'PYTHON'
import importlib
import pathlib
import sys

import tfckpt

checkout = pathlib.Path(sys.argv[1]) / "tfckpt"
installed = pathlib.Path(tfckpt.__file__).parent
if installed == checkout:
    sys.exit("the checkout was imported, not the wheel")


def files(root):
    return {
        path.relative_to(root)
        for path in root.rglob("*")
        if path.is_file() and path.suffix != ".pyc" and path.name != "BUILD"
    }


different = files(checkout) ^ files(installed)
if different:
    sys.exit(f"in the checkout or in the wheel only: {sorted(different)}")
for path in sorted(files(installed)):
    # Programs and workers run when they are imported.
    if path.suffix == ".py" and path.name != "__main__.py":
        parts = ("tfckpt", *path.with_suffix("").parts)
        importlib.import_module(".".join(parts).removesuffix(".__init__"))
print(f"The wheel of tfckpt {tfckpt.__version__} is complete and imports.")
PYTHON
