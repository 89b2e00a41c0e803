#!/bin/sh
# Prints the Python to build with, or names in one line what the machine lacks and how to get it.
set -u

fail() {
    echo "dsserve: $1" >&2
    exit 1
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

python=""
if [ -n "${PYTHON:-}" ]; then
    command -v "$PYTHON" >/dev/null 2>&1 || fail "PYTHON=$PYTHON is no program; set it to a Python 3.11 or newer"
    is_new_enough "$PYTHON" || fail "PYTHON=$PYTHON is $("$PYTHON" --version 2>&1); Python 3.11 or newer is needed"
    python=$PYTHON
else
    for candidate in python3 python3.13 python3.12 python3.11 python; do
        if command -v "$candidate" >/dev/null 2>&1 && is_new_enough "$candidate"; then
            python=$candidate
            break
        fi
    done
fi
if [ -z "$python" ]; then
    found=$(python3 --version 2>&1) || found="no python3"
    fail "Python 3.11 or newer is needed, found $found; install it (e.g. apt install python3.11-venv) or run make with PYTHON=/path/to/python3.11"
fi
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "$("$python" --version) lacks the venv module; install it (Debian, Ubuntu: apt install python3-venv)"
command -v cargo >/dev/null 2>&1 ||
    fail "no Rust toolchain (cargo) found; install one from https://rustup.rs and open a new shell"
rust=$(rustc --version 2>/dev/null | sed 's/^rustc 1\.\([0-9]*\).*/\1/')
case $rust in
'' | *[!0-9]*) fail "rustc does not run; repair the Rust toolchain (rustup default stable)" ;;
esac
[ "$rust" -ge 88 ] || fail "Rust 1.88 or newer is needed, found 1.$rust; run: rustup update stable"
command -v cc >/dev/null 2>&1 ||
    fail "no C compiler (cc) found; install one (Debian, Ubuntu: apt install build-essential)"
echo "$python"
