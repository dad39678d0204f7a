"""The version of this package, as installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("reliable-worker")
except PackageNotFoundError:  # run from a checkout that was never installed
    VERSION = "0"
