#!/usr/bin/env bash
# Sets up an environment of its own and passes the tests in it.
#
#   tools/test.sh           what every change has to pass
#   tools/test.sh --sweep   the widest sweeps too
#
# VENV is the folder of the environment, PYTHON the Python that makes it.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv-test}
python=${PYTHON:-python3}

scope="not sweep"
case "${1:-}" in
  "") ;;
  --sweep) scope="(sweep or not sweep)" ;;
  *) echo "tools/test.sh: unknown argument $1; known: --sweep" >&2; exit 2 ;;
esac

if ! "$python" -c "import sys; sys.exit(sys.version_info < (3, 11))"; then
  echo "tools/test.sh: needs Python 3.11 or newer; PYTHON=... names one" >&2
  exit 2
fi
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  --editable ".[bench,compile,examples,plot,test]"

export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2}
status=0
run() {
  local failed=0
  "$venv/bin/python" -m pytest "$@" || failed=$?
  # 5: no such test.
  ((failed == 0 || failed == 5)) || status=$failed
}
# Measurements first, with nothing beside them.
run -m "alone and $scope"
# Tracing keeps one core busy, so tests gain from a process per core; each
# takes about 2 GB, hence at most 4. XLA keeps what it has compiled as long as
# the process lives: after each quarter of the tests begin new ones.
files=(tests/*_test.py)
quarter=$(((${#files[@]} + 3) / 4))
for ((first = 0; first < ${#files[@]}; first += quarter)); do
  run --numprocesses=logical --maxprocesses=4 --dist=loadgroup \
    -m "not alone and $scope" "${files[@]:first:quarter}"
done
exit "$status"
