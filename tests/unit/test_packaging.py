"""Packaging: the build backend's staging, the tool checks of the Makefile, and a real wheel."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def backend():
    spec = importlib.util.spec_from_file_location(
        "build_backend", ROOT / "tools" / "build_backend.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path):
    kernels = tmp_path / "kernels" / "dsserve_kernels"
    (kernels / "__pycache__").mkdir(parents=True)
    (kernels / "__init__.py").write_text("", encoding="utf-8")
    (kernels / "__pycache__" / "x.pyc").write_text("", encoding="utf-8")
    (tmp_path / "kernels" / "csrc").mkdir()
    (tmp_path / "kernels" / "csrc" / "k.cu").write_text("", encoding="utf-8")
    (tmp_path / "python").mkdir()
    return tmp_path


def test_a_wheel_gets_real_folders_which_go_away_again(backend, tree):
    with backend.kernels_in_place(tree, "copy") as place:
        assert not place.is_symlink()
        files = sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())
        assert files == ["__init__.py", "csrc/k.cu"]
    assert list((tree / "python").iterdir()) == []


def test_a_failed_build_leaves_no_copy(backend, tree):
    with pytest.raises(RuntimeError), backend.kernels_in_place(tree, "copy"):
        raise RuntimeError
    assert list((tree / "python").iterdir()) == []


def test_an_editable_install_gets_a_link_that_stays_and_survives_a_wheel(backend, tree):
    with backend.kernels_in_place(tree, "link"):
        pass
    link = tree / "python" / "dsserve_kernels"
    assert (link / "__init__.py").is_file()
    with backend.kernels_in_place(tree, "copy") as place:
        assert not place.is_symlink()
    assert link.is_symlink()
    assert (tree / "kernels" / "dsserve_kernels" / "__init__.py").is_file()


def test_without_cargo_the_backend_says_so(backend, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"no Rust toolchain \(cargo\).*rustup"):
        backend.build_wheel(str(tmp_path))


def test_extras_and_the_command_are_declared():
    project = PROJECT["project"]
    extras = {"gpu", "llguidance", "mooncake", "nixl", "mori", "otel", "bench", "dev", "all"}
    assert set(project["optional-dependencies"]) == extras
    assert project["scripts"] == {"dsserve": "dsserve.cli.main:main"}
    assert project["requires-python"] == ">=3.11"
    assert "deepseek-recipe==0.2.0" in project["dependencies"]


def test_python_and_rust_packages_have_the_same_version():
    cargo = tomllib.loads((ROOT / "Cargo.toml").read_text(encoding="utf-8"))
    assert PROJECT["project"]["version"] == cargo["workspace"]["package"]["version"]


def preflight(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(folder), **variables}
    return subprocess.run(
        ["/bin/sh", ROOT / "tools" / "preflight.sh"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def add_tool(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture
def tools(tmp_path):
    """A PATH with everything that is needed."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sed").symlink_to(shutil.which("sed") or "/bin/sed")
    add_tool(folder, "python3", f'exec "{sys.executable}" "$@"')
    add_tool(folder, "cargo", "exit 0")
    add_tool(folder, "rustc", "echo 'rustc 1.95.0 (abc 2026-03-21)'")
    add_tool(folder, "cc", "exit 0")
    return folder


def test_a_machine_with_all_tools_passes(tools):
    result = preflight(tools)
    assert (result.returncode, result.stdout, result.stderr) == (0, "python3\n", "")


@pytest.mark.parametrize(
    ("name", "script", "said"),
    [
        ("cargo", None, "https://rustup.rs"),
        ("cc", None, "build-essential"),
        ("python3", None, "Python 3.11 or newer is needed, found no python3"),
        (
            "python3",
            "case $* in *version) echo Python 3.9.2;; *) exit 1;; esac",
            "found Python 3.9.2",
        ),
        (
            "python3",
            "case $* in *venv*) exit 1;; *version) echo Python 3.12;; esac",
            "python3-venv",
        ),
        ("rustc", "echo 'rustc 1.70.0 (abc)'", "rustup update stable"),
        ("rustc", "exit 1", "rustup default stable"),
    ],
)
def test_a_missing_or_old_tool_is_named_in_one_line_with_the_remedy(tools, name, script, said):
    (tools / name).unlink()
    if script is not None:
        add_tool(tools, name, script)
    result = preflight(tools)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("dsserve: ")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_newer_python_is_found_beside_an_old_one(tools):
    (tools / "python3").rename(tools / "python3.11")
    add_tool(tools, "python3", "exit 1")
    assert preflight(tools).stdout == "python3.11\n"


def test_the_chosen_python_is_checked(tools):
    assert "is no program" in preflight(tools, PYTHON="python9").stderr
    add_tool(tools, "old", "case $* in --version) echo Python 3.8;; *) exit 1;; esac")
    assert "PYTHON=old is Python 3.8" in preflight(tools, PYTHON="old").stderr
    assert preflight(tools, PYTHON="python3").stdout == "python3\n"


def test_every_target_of_the_makefile_is_explained():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = next(line for line in text.splitlines() if line.startswith(".PHONY:")).split()[1:]
    for target in phony:
        assert any(
            line.startswith(f"{target}:") and " ## " in line for line in text.splitlines()
        ), target
    for target in (
        "serve",
        "test",
        "test-rust",
        "test-py",
        "test-all",
        "build",
        "lint",
        "fmt",
        "bench",
        "docs",
    ):
        assert target in phony


@pytest.mark.slow
def test_the_wheel_holds_both_packages_and_the_extension(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run(
        [*command, "--wheel-dir", str(tmp_path), str(ROOT)],
        check=True,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert "-cp311-abi3-" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert "dsserve/_native.abi3.so" in names
    assert "dsserve/_native.pyi" in names
    assert "dsserve/cli/main.py" in names
    assert "dsserve_kernels/__init__.py" in names
    assert not [name for name in names if name.endswith((".pyc", ".rs"))]
    assert names.count("dsserve/_native.abi3.so") == 1
    sources = {
        f"{folder.name}/{path.relative_to(folder)}"
        for folder in (ROOT / "python" / "dsserve", ROOT / "kernels" / "dsserve_kernels")
        for path in folder.rglob("*.py")
    }
    assert sources <= set(names)
    package = ROOT / "python" / "dsserve"
    assets = {
        f"dsserve/{path.relative_to(package)}"
        for path in (package / "assets").rglob("*")
        if path.is_file()
    }
    assert assets <= set(names)
    entry = next(name for name in names if name.endswith("entry_points.txt"))
    with zipfile.ZipFile(wheel) as archive:
        assert "dsserve=dsserve.cli.main:main" in archive.read(entry).decode().replace(" ", "")
    assert [name for name in names if name.endswith("licenses/LICENSE")]
