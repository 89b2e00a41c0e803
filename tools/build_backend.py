"""Build backend (PEP 517): maturin, with the second package `dsserve_kernels` put where maturin sees it.

maturin takes several packages only from real folders under one `python-source`; it leaves a link out of a
wheel without a word. So `kernels/dsserve_kernels` (and the CUDA sources, `kernels/csrc`) are copied next to
`python/dsserve` while a wheel is built, and linked there for an editable install.
"""

from __future__ import annotations

import shutil
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import maturin
from maturin import (
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ROOT = Path(__file__).resolve().parent.parent
_IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc")


def build_wheel(
    wheel_directory: str,
    config_settings: Mapping[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build a wheel that holds `dsserve`, the extension and `dsserve_kernels`."""
    _require_cargo()
    with kernels_in_place(ROOT, "copy"):
        name: str = maturin.build_wheel(wheel_directory, config_settings, metadata_directory)
    return name


def build_sdist(sdist_directory: str, config_settings: Mapping[str, Any] | None = None) -> str:
    """Pack the sources; a wheel can be built from them."""
    _require_cargo()
    with kernels_in_place(ROOT, "copy"):
        name: str = maturin.build_sdist(sdist_directory, config_settings)
    return name


def build_editable(
    wheel_directory: str,
    config_settings: Mapping[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build the extension into the source tree; both packages are imported from there."""
    _require_cargo()
    with kernels_in_place(ROOT, "link"):
        name: str = maturin.build_editable(wheel_directory, config_settings, metadata_directory)
    return name


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: Mapping[str, Any] | None = None
) -> str:
    """Write the metadata of the wheel."""
    _require_cargo()
    name: str = maturin.prepare_metadata_for_build_wheel(metadata_directory, config_settings)
    return name


def prepare_metadata_for_build_editable(
    metadata_directory: str, config_settings: Mapping[str, Any] | None = None
) -> str:
    """Write the metadata of the editable wheel."""
    _require_cargo()
    name: str = maturin.prepare_metadata_for_build_editable(metadata_directory, config_settings)
    return name


@contextmanager
def kernels_in_place(root: Path, mode: Literal["copy", "link"]) -> Iterator[Path]:
    """Put `dsserve_kernels` next to `dsserve`, as a copy that goes away again or as a link that stays.

    A copy gives way to the link that was there before it, so that building a wheel does not break an
    editable install of the same checkout.
    """
    source = root / "kernels" / "dsserve_kernels"
    place = root / "python" / "dsserve_kernels"
    was_link = place.is_symlink()
    _remove(place)
    if mode == "link":
        _link(place)
        yield place
        return
    try:
        shutil.copytree(source, place, ignore=_IGNORED)
        cuda = root / "kernels" / "csrc"
        if cuda.is_dir():
            shutil.copytree(cuda, place / "csrc", ignore=_IGNORED)
        yield place
    finally:
        _remove(place)
        if was_link:
            _link(place)


def _link(place: Path) -> None:
    place.symlink_to(Path("..") / "kernels" / "dsserve_kernels", target_is_directory=True)


def _remove(place: Path) -> None:
    if place.is_symlink():
        place.unlink()
    elif place.is_dir():
        shutil.rmtree(place)


def _require_cargo() -> None:
    if shutil.which("cargo") is None:
        sys.exit(
            "dsserve: no Rust toolchain (cargo) found; install one from https://rustup.rs and try again"
        )
