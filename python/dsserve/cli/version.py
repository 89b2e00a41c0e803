"""`dsserve version`: the version of the package and of what it stands on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import click

from dsserve.config.version import package_version

#: Packages whose version matters for a bug report.
_SHOWN = ("torch", "deepseek-recipe", "tokenizers", "safetensors")


@click.command("version", help="Print the version of dsserve and of its main dependencies.")
def command() -> int:
    """Print the versions."""
    click.echo(f"dsserve {package_version()} (Python {platform.python_version()})")
    for name in _SHOWN:
        click.echo(f"  {name} {installed_version(name) or 'not installed'}")
    return 0


def installed_version(package: str) -> str | None:
    """Return the version of an installed distribution without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
