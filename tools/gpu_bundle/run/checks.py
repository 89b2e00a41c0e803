"""Runs the checks of a bundle on a machine with a CUDA device; needs nothing but Python's own library."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

#: The trained checkpoint of a source tree that travels beside the bundle.
SHIPPED = "python/dsserve/assets/dsserve-tiny"
#: Layers with the inputs of the reference path; it runs that path, too, so it is a check of its own.
LAYERS = "{work}/code/tests/gpu/test_layers_on_cuda.py"
#: Drafts are on by default.
NO_DRAFTS = ("--speculative-algorithm", "none")
#: Seconds that are kept for writing the results.
RESERVE_S = 8.0


@dataclass
class Place:
    """Where the bundle was unpacked.

    Attributes:
        work: The folder.
        golden: Name -> golden checkpoint.
        out: Folder of the results.
        end_s: When everything must have ended, on the monotonic clock.
    """

    work: Path
    golden: dict[str, Path]
    out: Path
    end_s: float

    @property
    def code(self) -> Path:
        """The source tree."""
        return self.work / "code"

    @property
    def model(self) -> Path:
        """The checkpoint to serve."""
        packed = [path for path in (self.work / "model").iterdir() if path.is_dir()]
        return packed[0] if packed else Path(SHIPPED).resolve()

    def environment(self, **changes: str) -> dict[str, str]:
        """Variables of a process that imports the bundle's packages."""
        folders = [
            self.code / "python",
            self.code / "kernels",
            self.work / "site",
            self.code / "tests",
            self.code,
        ]
        return {
            **os.environ,
            "PYTHONPATH": ":".join(str(folder) for folder in folders),
            "OMP_NUM_THREADS": "2",
            **changes,
        }


@dataclass
class Result:
    """What became of a check."""

    name: str
    ok: bool
    seconds: float
    note: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """A process that ends with 0 if all is well.

    Attributes:
        name: Of the check.
        command: Arguments, `{python}`, `{bin}`, `{model}`, `{out}` and golden names are filled in.
        is_alone: It measures time, so nothing runs beside it.
        seconds: At most.
        environment: Variables that it sets.
        note: Pattern of the lines of its output that are worth reading.
    """

    name: str
    command: tuple[str, ...]
    is_alone: bool = False
    seconds: float = 150.0
    environment: tuple[tuple[str, str], ...] = ()
    note: str = r"passed|failed|error|Error|FAIL"


def golden(name: str, level: str, *flags: str) -> Check:
    """golden_device.py through `--device cuda`."""
    command = ("{python}", "{bundle}/golden_device.py", "{bin}/dsserve", f"{{{name}}}", level)
    suffix = ".graph" if flags else ""
    return Check(
        f"golden.{name}.{level}{suffix}",
        (*command, "--device", "cuda", *flags),
        note=r"passed|FAIL|flips|Error",
    )


def tests(name: str, *arguments: str) -> Check:
    """Tests that need a device."""
    return Check(
        name,
        (
            *("{python}", "-m", "pytest", "-c", "{bundle}/pytest.ini"),
            *("--rootdir", "{work}/code", "-q", "-p", "no:cacheprovider", *arguments),
        ),
        note=r"passed|failed|^E  |FAILED|^SKIPPED|^layers",
    )


def server(
    name: str, *flags: str, guard: bool = False, port: int = 31000, alone: bool = False
) -> Check:
    """The client script of `examples/` against a server, then decode streams; times count only if it is alone."""
    command: tuple[str, ...] = (
        "{python}",
        "{bundle}/server_check.py",
        "--model",
        "{model}",
        "--name",
        name,
    )
    command += (
        "--out",
        "{out}",
        "--port",
        str(port),
        "--examples",
        "{work}/code/examples",
        "--",
        *flags,
    )
    variables = (("DSSERVE_SYNC_GUARD", "1"),) if guard else ()
    return Check(
        f"server.{name}",
        command,
        is_alone=alone,
        seconds=120.0,
        environment=variables,
        note=r"^(ok|FAIL|passed|skip)|Traceback|Error:",
    )


CHECKS = (
    Check("doctor", ("{bin}/dsserve", "doctor"), note=r"gpu|torch|cuda|failed"),
    tests("operators", "{work}/code/tests/gpu", f"--ignore={LAYERS}"),
    tests("layers", LAYERS, "-s"),
    golden("v41-tiny-a", "fp32"),
    golden("v41-tiny-a", "released"),
    golden("geom", "fp32"),
    golden("geom", "released"),
    golden("v41-tiny-a", "fp32", "--cuda-graph"),
    golden("v41-tiny-a", "released", "--cuda-graph"),
    golden("geom", "fp32", "--cuda-graph"),
    golden("geom", "released", "--cuda-graph"),
    Check(
        "embedded",
        ("{python}", "{bundle}/embedded_check.py", "{work}/model", "{model}", "{bin}/dsserve"),
    ),
    Check(
        "embedded.graph",
        (
            *("{python}", "{bundle}/embedded_check.py", "{work}/model", "{model}"),
            *("{bin}/dsserve", "--cuda-graph"),
        ),
    ),
    server("overlap", *NO_DRAFTS, guard=True, alone=True),
    server("dspark", "--speculative-algorithm", "DSPARK", guard=True, port=31030, alone=True),
    server("plain", *NO_DRAFTS, "--disable-overlap-schedule", port=31010),
    server("eager", *NO_DRAFTS, "--disable-cuda-graph", guard=True, port=31020),
    Check(
        "drafts",
        (
            *("{python}", "-m", "benchmarks.drafts", "--device", "cuda", "--model-path", "{model}"),
            *("--setups", "none", "static_5", "static_3", "--out", "{out}/drafts.json"),
        ),
        is_alone=True,
        note=r"_streams|ERROR|Error|Failed",
    ),
)


def main() -> int:
    """Unpack, run, write the results; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/dsserve-gpu"))
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("checks", nargs="*", help="names or beginnings of names; all if none")
    options = parser.parse_args()
    if options.list:
        sys.stdout.write("\n".join(check.name for check in CHECKS) + "\n")
        return 0
    begin_s = time.monotonic()
    place = Place(options.work, {}, options.out, begin_s + options.seconds - RESERVE_S)
    unpack(options.bundle, place)
    say(f"unpacked in {time.monotonic() - begin_s:.1f} s")
    wanted = [
        check
        for check in CHECKS
        if not options.checks or any(check.name.startswith(name) for name in options.checks)
    ]
    results: list[Result] = []
    with ThreadPoolExecutor(8) as pool:
        together = [check for check in wanted if not check.is_alone]
        results += pool.map(lambda check: run(check, place, options.bundle), together)
    for check in wanted:
        if check.is_alone:
            results.append(run(check, place, options.bundle))
    return write(results, place, time.monotonic() - begin_s)


def unpack(bundle: Path, place: Place) -> None:
    """Unpack all archives, find the golden checkpoints, write the `dsserve` command."""
    archives = sorted(bundle.glob("*.tar.xz"))

    def one(archive: Path) -> None:
        target = place.work / archive.name.removesuffix(".tar.xz")
        target.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as tar:
            tar.extractall(target, filter="data")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, archives))
    extension = place.work / "extension/_native.abi3.so"
    (place.code / "python/dsserve/_native.abi3.so").write_bytes(extension.read_bytes())
    for name in ("v41-tiny-a", "geom"):
        for folder in (place.work / name / name, Path("tests/golden/data") / name):
            if (folder / "golden.safetensors").is_file():
                place.golden.setdefault(name, folder.resolve())
    # Where the tests look for golden checkpoints.
    for name, folder in place.golden.items():
        data = place.code / "tests/golden/data" / name
        if not data.exists():
            data.parent.mkdir(parents=True, exist_ok=True)
            data.symlink_to(folder)
    command = place.work / "bin/dsserve"
    command.parent.mkdir(exist_ok=True)
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dsserve.cli.main "$@"\n')
    command.chmod(0o755)


def run(check: Check, place: Place, bundle: Path) -> Result:
    """Run one check within its time and that of the whole."""
    values = {
        "python": sys.executable,
        "bin": str(place.work / "bin"),
        "work": str(place.work),
        "out": str(place.out),
        "bundle": str(bundle),
        "model": str(place.model) if (place.work / "model").is_dir() else "",
        **{name: str(folder) for name, folder in place.golden.items()},
    }
    begin_s = time.monotonic()
    log = place.work / "logs" / f"{check.name}.log"
    log.parent.mkdir(exist_ok=True)
    limit_s = min(check.seconds, place.end_s - begin_s)
    try:
        command = [part.format(**values) for part in check.command]
    except KeyError as missing:
        return Result(check.name, False, 0.0, f"not in the bundle: {missing}")
    if limit_s < 5:
        return Result(check.name, False, 0.0, "no time left")
    environment = place.environment(**dict(check.environment))
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        timer = threading.Timer(limit_s, lambda: os.killpg(process.pid, 9))
        timer.start()
        code = process.wait()
        timer.cancel()
    seconds = time.monotonic() - begin_s
    text = log.read_text(errors="replace")
    lines = [line.strip() for line in text.splitlines() if re.search(check.note, line)]
    note = " | ".join(lines[-6:])[-900:] or text[-300:]
    details = place.work / "logs" / f"{check.name}.json"
    found = place.out / f"{check.name}.json"
    if found.is_file():
        found.replace(details)
    result = Result(check.name, code == 0, round(seconds, 1), note)
    if details.is_file():
        result.details = json.loads(details.read_text())
    say(f"{'ok  ' if result.ok else 'FAIL'} {check.name} ({seconds:.1f} s) {note[-400:]}")
    return result


def write(results: list[Result], place: Place, seconds: float) -> int:
    """Write results.json, summary.txt and the logs; returns the exit code."""
    with tarfile.open(place.out / "logs.tar.gz", "w:gz") as tar:
        for log in sorted((place.work / "logs").iterdir()):
            tar.add(log, log.name)
    body = {"seconds": round(seconds, 1), "results": [asdict(result) for result in results]}
    (place.out / "results.json").write_text(json.dumps(body, indent=1))
    lines = [
        f"{'ok  ' if r.ok else 'FAIL'} {r.seconds:6.1f} s  {r.name}: {r.note}" for r in results
    ]
    lines += [f"     {r.name}: {json.dumps(r.details)}" for r in results if r.details]
    lines.append(f"{sum(r.ok for r in results)} of {len(results)} ok in {seconds:.0f} s")
    text = "\n".join(lines) + "\n"
    (place.out / "summary.txt").write_text(text)
    sys.stdout.write("\n" + text)
    return 0 if all(result.ok for result in results) else 1


def say(text: str) -> None:
    """Write a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
