#!/usr/bin/env bash
# Unpacks the bundle that this script lies in, and runs checks on a CUDA device:
#   gpu_run.sh OUT_FOLDER SECONDS [CHECK...]
# OUT_FOLDER gets results.json, summary.txt and logs.tar.gz; CHECK is one of those that `checks.py --list` shows.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
out="$1"; seconds="$2"; shift 2
mkdir -p "$out"
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
exec python3 "$here/checks.py" --bundle "$here" --out "$out" --seconds "$seconds" "$@"
