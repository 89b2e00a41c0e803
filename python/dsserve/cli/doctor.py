"""`dsserve doctor`: what this machine has and lacks, one line per check, without starting anything."""

from __future__ import annotations

import importlib
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from dsserve.cli.version import installed_version
from dsserve.config.env import golden_dir, no_color
from dsserve.config.server import ServerConfig
from dsserve.config.values import format_size
from dsserve.config.version import package_version

if TYPE_CHECKING:
    from collections.abc import Iterator

_REQUIRED_PACKAGES = (
    "torch",
    "deepseek-recipe",
    "tokenizers",
    "safetensors",
    "fastapi",
    "pyzmq",
    "msgspec",
)
_OPTIONAL_PACKAGES = ("xgrammar", "llguidance")
_LEAST_MEMORY_BYTES = 4 * 1024**3
_LEAST_SHM_BYTES = 64 * 1024**2
_LEAST_OPEN_FILES = 1024
_COMMAND_TIMEOUT_S = 20
_TORCH_TIMEOUT_S = 120
#: Prints `ok` as its last line if a kernel runs.
_TORCH_PROBE = """
import torch
if not torch.cuda.is_available():
    print(f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no device")
else:
    print("ok" if int(torch.ones(2, device="cuda").sum()) == 2 else "wrong sum")
"""


class Verdict(Enum):
    """How a check went; only FAILED makes `dsserve doctor` exit with 1."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    FAILED = "failed"


_STYLES = {
    Verdict.OK: "green",
    Verdict.NOTE: "dim",
    Verdict.WARNING: "yellow",
    Verdict.FAILED: "bold red",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    verdict: Verdict
    detail: str


@click.command(
    "doctor", help="Check Python, packages, memory, limits, ports and GPUs of this machine."
)
@click.option("--port", type=click.IntRange(1, 65535), default=None, help="Port to try [30000].")
def command(port: int | None) -> int:
    """Print all findings; the exit code is 1 if something needed is missing."""
    console = Console(no_color=no_color(), highlight=False, soft_wrap=True)
    findings = list(examine(port if port is not None else ServerConfig().port))
    for finding in findings:
        verdict = f"[{_STYLES[finding.verdict]}]{finding.verdict.value:8}[/]"
        console.print(f"{verdict} [bold]{finding.name:18}[/] ", end="")
        console.print(finding.detail, markup=False)
    return 1 if any(each.verdict is Verdict.FAILED for each in findings) else 0


def examine(port: int) -> Iterator[Finding]:
    """Run all checks, in the order of the report."""
    yield Finding("dsserve", Verdict.OK, f"{package_version()} in {Path(__file__).parent.parent}")
    yield Finding("python", Verdict.OK, f"{platform.python_version()} at {sys.executable}")
    yield Finding(
        "system",
        Verdict.OK,
        f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}",
    )
    yield check_extension()
    yield from check_packages()
    yield check_cpu()
    yield check_memory()
    yield check_shared_memory()
    yield check_open_files()
    yield check_port(port)
    yield check_gpu()
    yield check_golden_data()


def check_extension() -> Finding:
    """Whether the Rust extension loads."""
    try:
        module = importlib.import_module("dsserve._native")
    except ImportError as error:
        return Finding("extension", Verdict.FAILED, f"does not load ({error}); run make build")
    return Finding("extension", Verdict.OK, str(module.__file__))


def check_packages() -> Iterator[Finding]:
    """Versions of the packages that dsserve needs or can use; none is imported."""
    for name in _REQUIRED_PACKAGES:
        version = installed_version(name)
        if version is None:
            yield Finding(name, Verdict.FAILED, f"not installed; run pip install {name}")
        else:
            yield Finding(name, Verdict.OK, version)
    for name in _OPTIONAL_PACKAGES:
        version = installed_version(name)
        yield Finding(name, Verdict.NOTE, version or "not installed (optional)")


def check_cpu() -> Finding:
    """Cores that this process may use."""
    usable = len(os.sched_getaffinity(0))
    return Finding(
        "cpu", Verdict.OK, f"{usable} of {os.cpu_count()} cores usable, {platform.machine()}"
    )


def check_memory() -> Finding:
    """Physical memory; the default pools and the embedded model want a few GiB."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    text = f"{format_size(total)}, {format_size(available)} free"
    if total < _LEAST_MEMORY_BYTES:
        remedy = "lower --max-total-tokens and --max-running-requests"
        return Finding("memory", Verdict.WARNING, f"{text}; little: {remedy}")
    return Finding("memory", Verdict.OK, text)


def check_shared_memory() -> Finding:
    """Size of /dev/shm, which containers often cut to 64 MB."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Finding("shared memory", Verdict.WARNING, f"/dev/shm: {error.strerror}")
    text = f"/dev/shm: {format_size(usage.total)}, {format_size(usage.free)} free"
    if usage.free < _LEAST_SHM_BYTES:
        return Finding(
            "shared memory", Verdict.WARNING, f"{text}; start the container with --shm-size"
        )
    return Finding("shared memory", Verdict.OK, text)


def check_open_files() -> Finding:
    """Limit of open files: each connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _LEAST_OPEN_FILES:
        return Finding("open files", Verdict.WARNING, f"{soft}; raise it with ulimit -n {hard}")
    return Finding("open files", Verdict.OK, f"{soft} (ulimit -n)")


def check_port(port: int) -> Finding:
    """Whether a server could listen on the port of the loopback interface."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return Finding(
                "port", Verdict.WARNING, f"{port}: {error.strerror}; choose another by --port"
            )
    return Finding("port", Verdict.OK, f"{port} is free")


def check_gpu() -> Finding:
    """GPUs that the driver shows, and whether torch can use them (`--device cuda`)."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Finding("gpu", Verdict.NOTE, "no nvidia-smi; the CPU is used")
    query = "--query-gpu=name,driver_version,compute_cap,memory.total"
    try:
        result = subprocess.run(
            [program, query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("gpu", Verdict.WARNING, f"nvidia-smi: {error}")
    if result.returncode:
        return Finding(
            "gpu", Verdict.WARNING, f"nvidia-smi: {result.stdout.strip() or result.stderr.strip()}"
        )
    cards = "; ".join(result.stdout.strip().splitlines())
    problem = torch_problem()
    if problem:
        return Finding("gpu", Verdict.WARNING, f"{cards}; --device cuda does not work: {problem}")
    return Finding("gpu", Verdict.OK, f"{cards}; --device cuda works")


def torch_problem() -> str:
    """Why torch cannot use a CUDA device; empty if it can. Asked in a process of its own: this one has no torch."""
    try:
        result = subprocess.run(
            [sys.executable, "-c", _TORCH_PROBE],
            capture_output=True,
            text=True,
            timeout=_TORCH_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = result.stdout.strip().splitlines() or result.stderr.strip().splitlines()
    if result.returncode == 0 and lines and lines[-1] == "ok":
        return ""
    return lines[-1] if lines else f"exit code {result.returncode}"


def check_golden_data() -> Finding:
    """Where the golden data of the tests is."""
    folder = golden_dir()
    if folder is None:
        return Finding("golden data", Verdict.NOTE, "DSSERVE_GOLDEN is not set (only tests use it)")
    if not Path(folder).is_dir():
        return Finding("golden data", Verdict.WARNING, f"DSSERVE_GOLDEN={folder} is no folder")
    return Finding("golden data", Verdict.OK, folder)
