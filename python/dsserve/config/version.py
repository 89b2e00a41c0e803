"""The version of the installed package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """Return the version of dsserve, or a word that says it runs from a source tree."""
    try:
        return version("dsserve")
    except PackageNotFoundError:
        return "0+source"
