#!/usr/bin/env bash
# Builds the extension into the source tree (release mode), for development without reinstalling.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo build --release -q -p dsserve-bindings
cp target/release/lib_native.so python/dsserve/_native.abi3.so.tmp
mv python/dsserve/_native.abi3.so.tmp python/dsserve/_native.abi3.so
