#!/usr/bin/env bash
# Line coverage of the library crates by their own tests; fails below 90 % for any of them.
# Usage: tools/coverage.sh [PACKAGE ...]   (default: all three)
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" = --rustc ]; then # cargo calls this script back as its compiler of our crates
  shift
  exec "$@" -C instrument-coverage
fi
tools=$(dirname "$(find "$(rustc --print sysroot)" -name llvm-profdata -type f | head -1)")
if [ ! -x "$tools/llvm-cov" ]; then
  echo "coverage needs llvm-cov and llvm-profdata of the compiler: rustup component add llvm-tools" >&2
  exit 1
fi
packages=("$@")
[ ${#packages[@]} -gt 0 ] || packages=(dsserve-radix-cache dsserve-scheduler dsserve-tokenizer)
out=${CARGO_TARGET_DIR:-$PWD/target}/coverage
rm -rf "$out" && mkdir -p "$out"
cat >"$out/rustc" <<EOF
#!/bin/sh
exec "$PWD/tools/coverage.sh" --rustc "\$@"
EOF
chmod +x "$out/rustc"
export RUSTC_WORKSPACE_WRAPPER=$out/rustc LLVM_PROFILE_FILE=$out/%p-%m.profraw
selected=("${packages[@]/#/--package=}")
cargo test "${selected[@]}" --lib --tests --locked --quiet
mapfile -t binaries < <(
  cargo test "${selected[@]}" --lib --tests --locked --no-run --message-format=json 2>/dev/null |
    python3 -c 'import json, sys
for line in sys.stdin:
    message = json.loads(line) if line.startswith("{") else {}
    if message.get("executable") and message["profile"]["test"]:
        print(message["executable"])'
)
"$tools/llvm-profdata" merge -sparse "$out"/*.profraw -o "$out/merged.profdata"
objects=()
for binary in "${binaries[@]:1}"; do objects+=(-object "$binary"); done
"$tools/llvm-cov" export -summary-only -instr-profile "$out/merged.profdata" \
  -ignore-filename-regex '/(tests|examples|benches)/|/\.cargo/|/rustc/' "${binaries[0]}" "${objects[@]}" >"$out/summary.json"
python3 - "$out/summary.json" "${packages[@]}" <<'EOF'
import json
import sys
from pathlib import Path

files = json.loads(Path(sys.argv[1]).read_text())["data"][0]["files"]
failed = False
for package in sys.argv[2:]:
    folder = f"/rust/{package.removeprefix('dsserve-').replace('-', '_')}/src/"
    lines = [(f["filename"], f["summary"]["lines"]) for f in files if folder in f["filename"]]
    count = sum(line["count"] for _, line in lines)
    percent = 100 * sum(line["covered"] for _, line in lines) / max(1, count)
    failed |= percent < 90
    print(f"{package}: {percent:.1f} % of {count} lines")
    for name, line in sorted(lines, key=lambda item: item[1]["percent"]):
        if line["percent"] < 90:
            print(f"  {line['percent']:5.1f} % {name.split(folder)[1]}")
sys.exit(failed)
EOF
