"""The bundle for a GPU machine: what is packed, and that checks call what travels with them."""

from __future__ import annotations

import importlib
import tarfile
from typing import TYPE_CHECKING

from benchmarks import drafts
from tools.gpu_bundle.__main__ import CODE, LEFT_OUT, ROOT
from tools.gpu_bundle.parts import Part, pack
from tools.gpu_bundle.run.checks import CHECKS

if TYPE_CHECKING:
    from pathlib import Path


def packed(folder: Path, *sources: Path) -> set[str]:
    target = folder / "code.tar.xz"
    pack(Part("code", list(sources), "code"), target, cache=folder, left_out=LEFT_OUT)
    with tarfile.open(target) as tar:
        return set(tar.getnames())


def test_names_and_parts_of_paths_are_left_out(tmp_path: Path):
    kept = ("tests/data/a.py", "tests/golden/b.py", "tests/my_golden/data/c.py")
    dropped = ("tests/golden/data/d.bin", "tests/x/__pycache__/e.pyc", "tests/assets/f.bin")
    for name in (*kept, *dropped):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    assert packed(tmp_path, tmp_path / "tests") == set(kept)


def test_the_draft_benchmark_travels_with_its_tasks(tmp_path: Path):
    names = packed(tmp_path, *(ROOT / name for name in CODE))
    assert {
        "benchmarks/drafts.py",
        "benchmarks/http_server.py",
        "tools/tiny_model/data/mix.py",
        "tools/tiny_model/data/words.txt",
        "tools/tiny_model/tokenizer.json",
        "tools/tiny_model/served/client.py",
    } <= names
    assert not any("results/" in name or "golden/data/" in name for name in names)


def test_the_check_of_drafts_gives_flags_that_the_benchmark_takes():
    (check,) = (check for check in CHECKS if check.name == "drafts")
    assert check.is_alone
    python, dash_m, module, *arguments = check.command
    assert (python, dash_m) == ("{python}", "-m")
    assert importlib.import_module(module) is drafts
    options = drafts.parser().parse_args(arguments)
    assert (options.device, options.requests) == ("cuda", None)
    assert options.out.name == f"{check.name}.json"
    assert options.setups == ["none", "static_5", "static_3"]
