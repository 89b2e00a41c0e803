"""Import rules: the layers, no torch in the API process, and who may read the environment."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "dsserve"
KERNELS = ROOT / "kernels" / "dsserve_kernels"

#: What a server's API process imports; each must leave torch alone, however indirectly.
API_MODULES = [
    "dsserve.cli.main",
    "dsserve.cli.launch",
    "dsserve.cli.chat",
    "dsserve.cli.doctor",
    "dsserve.launch_server",
    "dsserve.engine.supervisor",
    "dsserve.entrypoints.server",
]


def modules(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "assets" not in path.parts)


def test_import_contracts_hold():
    result = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache", "--config", "pyproject.toml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("module", API_MODULES)
def test_the_api_process_does_not_load_torch(module):
    assert importlib.util.find_spec(module) is not None
    code = f"import sys, {module}; print(*({{'torch', 'transformers'}} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr, result.stdout) == (0, "", "\n")


def test_the_environment_is_read_in_one_place():
    allowed = {PACKAGE / "config" / "env.py", KERNELS / "select.py"}
    readers = [
        path
        for path in (*modules(PACKAGE), *modules(KERNELS))
        if path not in allowed
        and any(
            isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        )
    ]
    assert readers == []


def test_package_initialisers_hold_a_docstring_only():
    for path in modules(PACKAGE):
        if path.name == "__init__.py":
            body = ast.parse(path.read_text(encoding="utf-8")).body
            assert [type(node) for node in body] == [ast.Expr], path


def test_every_module_says_what_it_is_for():
    for path in (*modules(PACKAGE), *modules(KERNELS)):
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path
