"""The Rust crates as others get them: complete, and building from what `cargo package` makes."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CRATES = ("radix_cache", "scheduler", "tokenizer")


@pytest.mark.parametrize("crate", CRATES)
def test_a_crate_has_what_its_users_look_for(crate):
    folder = ROOT / "rust" / crate
    package = tomllib.loads((folder / "Cargo.toml").read_text(encoding="utf-8"))["package"]
    assert package["description"]
    assert package["keywords"]
    assert package["categories"]
    assert package["license"] == {"workspace": True}
    readme = (folder / package["readme"]).read_text(encoding="utf-8")
    assert "```rust" in readme
    assert "README.md" in (folder / "src" / "lib.rs").read_text(encoding="utf-8")
    assert (folder / "examples" / "toy_server.rs").is_file()


@pytest.mark.parametrize("crate", CRATES)
def test_a_library_crate_knows_no_python(crate):
    manifest = tomllib.loads((ROOT / "rust" / crate / "Cargo.toml").read_text(encoding="utf-8"))
    named = {name for table in ("dependencies", "dev-dependencies") for name in manifest[table]}
    assert not named & {"pyo3", "numpy"}


@pytest.mark.slow
def test_packaged_crates_build_on_their_own():
    command = "cargo package --workspace --exclude dsserve-bindings --locked --allow-dirty"
    cargo = shutil.which("cargo") or Path.home() / ".cargo" / "bin" / "cargo"
    done = subprocess.run(
        [cargo, *command.split()[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    for crate in CRATES:
        name = f"dsserve-{crate.replace('_', '-')}-0.1.0"
        assert (target / "package" / f"{name}.crate").is_file()
