"""Starts a server on the device, runs the client script against it, measures decode streams, stops it.

server_check.py --model DIR --name NAME --out DIR --port N --examples DIR -- FLAG...
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

START_S = 80.0
CLIENT_S = 60.0
STREAMS, TOKENS = (1, 8), 48


def main() -> int:
    """Run the check; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--examples", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("flags", nargs="*")
    options = parser.parse_args()
    url = f"http://127.0.0.1:{options.port}"
    command = [sys.executable, "-m", "dsserve.cli.main", "launch", "--model-path", options.model]
    command += ["--device", options.device, "--port", str(options.port), *options.flags]
    server = subprocess.Popen(command)
    details: dict[str, Any] = {}
    is_ok = False
    try:
        begin_s = time.monotonic()
        wait_ready(server, url)
        details["start_s"] = round(time.monotonic() - begin_s, 1)
        client = [sys.executable, str(options.examples / "openai_client.py"), "--base-url", url]
        is_ok = subprocess.run(client, timeout=CLIENT_S, check=False).returncode == 0
        details["answer"] = answer(url)
        for count in STREAMS:
            details[f"streams_{count}"] = asyncio.run(decode(url, count))
        details["engine_steps"] = recent_steps(url)
    except (httpx.HTTPError, subprocess.TimeoutExpired, TimeoutError, OSError, KeyError) as error:
        is_ok = False
        sys.stdout.write(f"FAIL {type(error).__name__}: {error}\n")
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            details["exit_code"] = server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            server.kill()
            details["exit_code"] = None
    is_ok = is_ok and details["exit_code"] == 0
    (options.out / f"server.{options.name}.json").write_text(json.dumps(details))
    sys.stdout.write(f"{'passed' if is_ok else 'FAIL'} {json.dumps(details)[:600]}\n")
    return 0 if is_ok else 1


def wait_ready(server: subprocess.Popen[bytes], url: str) -> None:
    """Wait until the server takes requests."""
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        if server.poll() is not None:
            raise OSError(f"the server ended with {server.returncode}")
        try:
            if httpx.get(f"{url}/ready", timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise TimeoutError(f"not ready after {START_S:.0f} s")


def answer(url: str) -> str:
    """One short answer, for people to read."""
    body = {
        "messages": [{"role": "user", "content": "What is 47 + 85?"}],
        "temperature": 0,
        "max_tokens": 40,
        "thinking": {"type": "disabled"},
    }
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30)
    return str(response.json()["choices"][0]["message"]["content"])


async def decode(url: str, count: int) -> dict[str, float]:
    """So many streams of tokens at once: time, and what the engine says of its decode steps meanwhile."""
    before = totals(url)
    begin_s = time.monotonic()
    async with httpx.AsyncClient(timeout=60) as client:
        bodies = [
            {
                "prompt": [0, 100 + i, 101, 102],
                "max_tokens": TOKENS,
                "temperature": 0,
                "ignore_eos": True,
            }
            for i in range(count)
        ]
        responses = await asyncio.gather(
            *(client.post(f"{url}/v1/completions", json=body) for body in bodies)
        )
    seconds = time.monotonic() - begin_s
    tokens = sum(response.json()["usage"]["completion_tokens"] for response in responses)
    # The engine tells its totals once a second.
    await asyncio.sleep(1.6)
    after = totals(url)
    moved = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in after}
    steps = moved.get("step_count", 0.0) or 1.0
    gaps = moved.get("gap_count", 0.0) or 1.0
    return {
        "tokens_per_s": round(tokens / seconds, 1),
        "decode_steps": steps,
        "step_ms": round(moved.get("step_sum", 0.0) / steps * 1e3, 4),
        "host_gap_ms": round(moved.get("gap_sum", 0.0) / gaps * 1e3, 4),
        **{
            f"{stage}_ms_per_step": round(moved.get(f"stage_{stage}", 0.0) / steps * 1e3, 4)
            for stage in ("plan", "launch", "wait", "result")
        },
    }


PATTERNS = {
    "step_count": r'dsserve_step_seconds_count\{[^}]*kind="(?:decode|verify)"[^}]*\} (\S+)',
    "step_sum": r'dsserve_step_seconds_sum\{[^}]*kind="(?:decode|verify)"[^}]*\} (\S+)',
    "gap_count": r'dsserve_host_gap_seconds_count\{[^}]*kind="(?:decode|verify)"[^}]*\} (\S+)',
    "gap_sum": r'dsserve_host_gap_seconds_sum\{[^}]*kind="(?:decode|verify)"[^}]*\} (\S+)',
}


def totals(url: str) -> dict[str, float]:
    """Sums and counts of decode steps, host gaps and the loop's stages."""
    text = httpx.get(f"{url}/metrics", timeout=10).text
    found = {name: sum(map(float, re.findall(p, text))) for name, p in PATTERNS.items()}
    for stage in ("plan", "launch", "wait", "result"):
        pattern = rf'dsserve_scheduler_stage_seconds\w*\{{[^}}]*stage="{stage}"[^}}]*\}} (\S+)'
        found[f"stage_{stage}"] = sum(map(float, re.findall(pattern, text)))
    return found


def recent_steps(url: str) -> list[dict[str, Any]]:
    """The newest decode steps: how long, and how long the device had nothing to do before each."""
    info = httpx.get(f"{url}/get_server_info", timeout=30).json()
    steps = (info.get("state") or {}).get("recent_steps") or []
    rows, last_s = [], 0.0
    for step in steps[-24:]:
        row = {
            "kind": step["kind"],
            "rows": step["num_rows"],
            "step_ms": round((step["finished_s"] - step["started_s"]) * 1e3, 3),
        }
        if last_s:
            row["gap_ms"] = round((step["started_s"] - last_s) * 1e3, 3)
        last_s = step["finished_s"]
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
