"""Runs pytest on the files given, for `pytest.bzl`."""

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[1:]))
