"""Packs one part of the bundle into an archive; a part that did not change is not packed again."""

from __future__ import annotations

import hashlib
import io
import lzma
import shutil
import tarfile
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Part:
    """An archive of the bundle.

    Attributes:
        name: Of the archive.
        sources: Files and folders, which lie side by side in it; wheels are unpacked.
        what: For people.
    """

    name: str
    sources: list[Path]
    what: str


def pack(part: Part, target: Path, *, cache: Path, left_out: Collection[str]) -> int:
    """Write the archive of a part; returns its bytes.

    Args:
        part: What to pack.
        target: Archive to write.
        cache: Folder of archives packed before, by content.
        left_out: Names of files and folders that are skipped, below the sources; several parts of a path are
            joined by slashes.
    """
    files = dict(sorted(_files(part.sources, left_out)))
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    kept = cache / f"{part.name}-{digest.hexdigest()[:16]}.tar.xz"
    if not kept.is_file():
        for old in cache.glob(f"{part.name}-*.tar.xz"):
            old.unlink()
        # The small preset: presets above it gain a tenth and take three times as long.
        with (
            lzma.open(kept, "wb", preset=2) as stream,
            tarfile.open(fileobj=stream, mode="w") as tar,
        ):
            for name, content in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                entry.mode = 0o644
                tar.addfile(entry, io.BytesIO(content))
    shutil.copy(kept, target)
    return target.stat().st_size


def _files(sources: list[Path], left_out: Collection[str]) -> Iterator[tuple[str, bytes]]:
    for source in sources:
        if source.suffix == ".whl":
            yield from _wheel_files(source)
        elif source.is_file():
            yield source.name, source.read_bytes()
        else:
            for path in source.rglob("*"):
                inside = path.relative_to(source)
                whole = f"/{inside.as_posix()}/"
                if path.is_file() and not any(f"/{name}/" in whole for name in left_out):
                    yield str(source.name / inside), path.read_bytes()


def _wheel_files(wheel: Path) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.endswith("/"):
                yield name, archive.read(name)
