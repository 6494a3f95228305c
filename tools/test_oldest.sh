#!/usr/bin/env bash
# Passes the tests with the oldest supported versions: every lower bound of
# install_requires in setup.py, taken as the version.
#
# VENV is the folder of the environment, PYTHON the Python that makes it (3.11
# to 3.13: no newer one has the oldest TensorFlow). Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv-oldest}
python=${PYTHON:-python3}

if ! "$python" -c \
  "import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))"; then
  echo "tools/test_oldest.sh: needs Python 3.11, 3.12 or 3.13;" \
    "PYTHON=... names one" >&2
  exit 2
fi
mapfile -t oldest < <(
  sed -n '/install_requires/,/\]/s/.*"\(.*\)>=\(.*\)".*/\1==\2/p' setup.py
)
echo "Oldest versions: ${oldest[*]}"
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  "${oldest[@]}" --editable ".[examples,plot,test]"

export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2}
# Of old versions the numbers have to be right; how fast they are, and what
# today's compilers make of them, is measured with the newest.
exec "$venv/bin/python" -m pytest --numprocesses=logical --maxprocesses=4 \
  --dist=loadgroup -m "not alone and not compile and not sweep" "$@"
