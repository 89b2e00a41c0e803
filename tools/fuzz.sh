#!/usr/bin/env bash
# Fuzzes the Rust crates with libFuzzer, guided by coverage, on the project's own compiler; ends with the
# first input that fails. Usage: tools/fuzz.sh SECONDS_EACH [TARGET ...]   (default: all targets)
set -euo pipefail
cd "$(dirname "$0")/../rust/fuzz"
seconds=$1
shift
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(radix_ops scheduler_events stream_decode encode)
if ! command -v "${CXX:-c++}" >/dev/null; then
  echo "fuzzing builds libFuzzer, which needs a C++ compiler: install g++ or clang++, or set CXX." >&2
  echo "Without one, blind mutation of the corpus: cd rust/fuzz && cargo run --release --bin smoke -- --seconds $seconds" >&2
  exit 1
fi
# What `cargo fuzz` sets, without a sanitizer: then it needs no nightly compiler, and the crates have no
# unsafe code that one would look at.
flags=(
  -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4
  -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table
  -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1
)
export RUSTFLAGS="${flags[*]}"
# A target is named so that build scripts are built without the flags.
host=$(rustc -vV | sed -n 's/^host: //p')
cargo build --release --locked --features libfuzzer "${targets[@]/#/--bin=}" --target "$host"
binaries=${CARGO_TARGET_DIR:-target}/$host/release
for target in "${targets[@]}"; do
  found=target/corpus/$target
  mkdir -p "$found" "artifacts/$target"
  echo "== $target: $seconds s"
  "$binaries/$target" -max_total_time="$seconds" -max_len=2048 -timeout=30 -rss_limit_mb=4096 \
    -artifact_prefix="artifacts/$target/" -print_final_stats=1 -verbosity=1 "$found" "corpus/$target" \
    2>"$found.log" || { tail -40 "$found.log"; exit 1; }
  grep -E '^(Done|stat::(number_of_executed_units|new_units_added|slowest_unit_time_sec|peak_rss_mb))' "$found.log"
done
echo "clean"
