"""Finds what a requirement needs, beside what the machine has, and downloads wheels for its Python."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

#: What the `serve` set is installed from; openai is for the client script of `examples/`.
SERVE = (
    "click",
    "deepseek-recipe",
    "fastapi",
    "httptools",
    "httpx",
    "msgspec",
    "openai",
    "orjson",
    "prometheus-client",
    "pydantic",
    "pyyaml",
    "pyzmq",
    "rich",
    "uvicorn",
    "uvloop",
)
#: Never packed: they bring the CUDA libraries, or hundreds of megabytes, with them.
ON_THE_MACHINE = ("numpy", "safetensors", "tokenizers", "torch")
#: Newest first; the machine's glibc must not be older than the first.
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_24_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)


def needed(names: Iterable[str], provided: Iterable[str], python: str) -> dict[str, str]:
    """Name and version, as installed here, of everything that `names` need, without what is `provided`."""
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "extra": "",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    skipped = {canonicalize_name(name) for name in provided}
    found: dict[str, str] = {}
    waiting = [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found or name in skipped:
            continue
        distribution = metadata.distribution(name)
        found[name] = distribution.version
        for text in distribution.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate(environment):
                waiting.append(canonicalize_name(requirement.name))
    return dict(sorted(found.items()))


def download(versions: dict[str, str], folder: Path, python: str) -> list[Path]:
    """One wheel each, for CPython `python` on Linux x86-64; wheels that are there already are kept.

    Raises:
        subprocess.CalledProcessError: There is no such wheel, or no network.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {name.replace("-", "_"): version for name, version in versions.items()}
    present = {}
    for wheel in folder.glob("*.whl"):
        name, version = wheel.name.split("-")[:2]
        key = canonicalize_name(name).replace("-", "_")
        if wanted.get(key) == version:
            present[key] = wheel
        else:
            wheel.unlink()
    missing = [f"{name}=={version}" for name, version in wanted.items() if name not in present]
    if missing:
        platforms = [argument for name in PLATFORMS for argument in ("--platform", name)]
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
                *("--only-binary=:all:", "--python-version", python, "--implementation", "cp"),
                *platforms,
                *("--dest", str(folder), *missing),
            ],
            check=True,
        )
    return sorted(folder.glob("*.whl"))
