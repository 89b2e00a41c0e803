"""`python -m tools.gpu_bundle`: writes the folder that is carried to a GPU machine; see `docs/gpu.md`."""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

from tools.gpu_bundle.parts import Part, pack
from tools.gpu_bundle.wheels import ON_THE_MACHINE, SERVE, download, needed

logger = logging.getLogger("gpu_bundle")

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "python/dsserve/assets/dsserve-tiny"
RUN = Path(__file__).resolve().parent / "run"
#: Folders of the source tree that checks need, and what of them is left out.
CODE = ("python", "kernels", "examples", "tests", "benchmarks", "tools", "pyproject.toml")
LEFT_OUT = (
    *("__pycache__", ".pytest_cache", ".mypy_cache", "_native.abi3.so"),
    *("assets", "golden/data", "results"),
)
#: A warning is given beyond so many bytes.
LIMIT_BYTES = 40 << 20


def main() -> int:
    """Build the bundle; returns the exit code."""
    options = _options()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    scratch = out.with_name(out.name + ".parts")
    versions = needed(SERVE, {*ON_THE_MACHINE, *options.provided}, options.python)
    wheels = download(versions, scratch / "wheels", options.python)
    extension = scratch / "_native.abi3.so"
    shutil.copy(options.tree / "python/dsserve/_native.abi3.so", extension)
    subprocess.run(["strip", str(extension)], check=False)
    parts = [
        Part("site", wheels, "wheels, unpacked"),
        Part("extension", [extension], "the Rust extension"),
        Part("code", [options.tree / name for name in CODE], "Python packages and tests"),
    ]
    expected = scratch / "expected.json"
    if not expected.is_file() or options.fresh:
        _write_expected(options.checkpoint, expected)
    packed = [] if options.beside_checkout else [options.checkpoint]
    parts.append(Part("model", [*packed, expected], "checkpoint and what it says on the CPU"))
    parts += [
        Part(folder.name, [folder], "golden data") for folder in options.golden if folder.is_dir()
    ]
    sizes = {}
    for part in parts:
        target = out / f"{part.name}.tar.xz"
        sizes[part.name] = pack(part, target, cache=scratch, left_out=LEFT_OUT)
        logger.info("%8.2f MiB  %s (%s)", sizes[part.name] / 2**20, part.name, part.what)
    for old in out.glob("*.tar.xz"):
        if old.name.removesuffix(".tar.xz") not in sizes:
            old.unlink()
    for script in RUN.iterdir():
        if script.suffix in (".sh", ".py", ".ini"):
            shutil.copy(script, out / script.name)
    total = sum(sizes.values())
    (out / "contents.json").write_text(json.dumps({"parts": sizes, "wheels": versions}, indent=1))
    logger.info("%8.2f MiB  in %s", total / 2**20, out)
    if total > LIMIT_BYTES:
        logger.warning("more than %d MiB: leave something out", LIMIT_BYTES >> 20)
    return 0


def _write_expected(checkpoint: Path, target: Path) -> None:
    command = [sys.executable, "-m", "tools.gpu_bundle.expected", str(checkpoint), str(target)]
    subprocess.run(command, check=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", choices=("serve",), default="serve", help="what is packed")
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu-bundle")
    parser.add_argument("--tree", type=Path, default=ROOT, help="source tree with the extension")
    parser.add_argument("--python", default="3.12", help="Python of the machine")
    parser.add_argument(
        "--provided", nargs="*", default=[], help="packages of the machine beside torch and numpy"
    )
    parser.add_argument("--checkpoint", type=Path, default=SHIPPED, help="what is served there")
    parser.add_argument("--golden", type=Path, nargs="*", default=[], help="golden checkpoints")
    parser.add_argument(
        "--beside-checkout",
        action="store_true",
        help="the source tree travels, too: its checkpoint is not packed",
    )
    parser.add_argument("--fresh", action="store_true", help="compute expected tokens again")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
