# Sets up, runs and tests dsserve from a fresh checkout; `make help` lists the targets.

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
BUILT := $(VENV)/.built
RUST_SOURCES := Cargo.toml Cargo.lock $(shell find rust -name '*.rs' -o -name Cargo.toml)
PYTHON_CODE := python/dsserve kernels/dsserve_kernels tests tools examples benchmarks
ARGS ?=
# Two workers halve the time on two cores; a file's tests stay in one worker, which shares servers and models.
PYTEST := $(BIN)/pytest -n 2 --dist loadfile

# rustup installs here; a shell that was opened before does not know it yet.
export PATH := $(PATH):$(HOME)/.cargo/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help serve chat test test-rust test-py test-wheel test-all build lint fmt bench bench-peers soak eval-tiny gpu-bundle fuzz coverage docs wheel clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | awk -F'\t' '{printf "  %-12s %s\n", $$1, $$2}'

serve: build ## Start a server on 127.0.0.1:30000 with the embedded model; flags: make serve ARGS="--port 31000"
	@exec $(BIN)/dsserve launch $(ARGS)

chat: build ## Talk to a running server in the terminal
	@exec $(BIN)/dsserve chat $(ARGS)

test: test-rust test-py test-wheel ## Run all default tests (Rust, Python, the wheel)

test-rust: ## Run the tests of the Rust crates
	@tools/preflight.sh >/dev/null
	cargo test --workspace --exclude dsserve-bindings --locked

test-py: build ## Run the default Python tests; flags: make test-py ARGS="-k radix"
	$(PYTEST) -m "not slow and not gpu" $(ARGS)

test-wheel: build ## Build a wheel and look into it
	$(BIN)/pytest -m slow tests/unit/test_packaging.py

test-all: test-rust build ## Run every test that needs no GPU, the slow ones too
	cargo test --workspace --exclude dsserve-bindings --locked --tests -- --ignored
	cargo test --manifest-path rust/fuzz/Cargo.toml --target-dir target --locked
	$(PYTEST) -m "not gpu" $(ARGS)

build: $(BUILT) ## Make .venv, build the Rust extension, install the package (editable)

lint: build ## Check formatting, lints, types, import layers and the stub of the extension
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	$(BIN)/ruff check $(PYTHON_CODE)
	$(BIN)/ruff format --check $(PYTHON_CODE)
	$(BIN)/mypy python/dsserve kernels/dsserve_kernels tools
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m mypy.stubtest dsserve._native

fmt: build ## Format Rust and Python code
	cargo fmt --all
	$(BIN)/ruff check --fix --quiet $(PYTHON_CODE) || true
	$(BIN)/ruff format $(PYTHON_CODE)

bench: build ## Measure speed; results go to benchmarks/results/
	$(BIN)/python -m benchmarks $(ARGS)

bench-peers: build ## Measure the core beside other engines that are installed; PEERS_PYTHON=their python
	PYTHONPATH=python:kernels:. $(or $(PEERS_PYTHON),$(BIN)/python) -m benchmarks.peers $(ARGS)

soak: build ## Run the engine under random load and look for leaks; SECONDS=1800 ARGS="--rate 2000"
	$(BIN)/python -m benchmarks.soak --seconds $(or $(SECONDS),1800) $(ARGS)

eval-tiny: build ## Score the embedded model through the HTTP API; CHECKPOINT=DIR COUNT=64 ROWS="table,date" OUT=FILE
	$(BIN)/python -m tools.tiny_model.served $(if $(CHECKPOINT),--checkpoint "$(CHECKPOINT)") \
	  $(if $(COUNT),--count $(COUNT)) $(if $(ROWS),--rows "$(ROWS)") $(if $(OUT),--out "$(OUT)") $(if $(CARD),--markdown "$(CARD)") $(ARGS)

gpu-bundle: build ## Pack what a GPU machine with torch and no network needs into .gpu-bundle; SET=serve CHECKPOINT=DIR ARGS=".."
	$(BIN)/python -m tools.gpu_bundle --set $(or $(SET),serve) $(if $(CHECKPOINT),--checkpoint "$(CHECKPOINT)") $(ARGS)

SECONDS_EACH ?= 150

fuzz: ## Fuzz the Rust crates, 10 minutes in all; SECONDS_EACH=N for each of the four targets (needs a C++ compiler)
	tools/fuzz.sh $(SECONDS_EACH)

coverage: ## Line coverage of the three library crates (needs the component llvm-tools)
	tools/coverage.sh

docs: ## Build the reference of the Rust crates (target/doc)
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked

wheel: build ## Build a wheel with both packages into dist/
	$(BIN)/pip wheel --no-deps --no-build-isolation --wheel-dir dist .

clean: ## Remove the environment and everything built
	rm -rf $(VENV) target dist build python/dsserve/_native*.so python/dsserve_kernels

# A change of the dependencies or of the packaging installs again; a change of Rust only builds the extension.
$(INSTALLED): pyproject.toml tools/build_backend.py
	@python=$$(tools/preflight.sh) && \
	  { test -x $(BIN)/python || $$python -m venv $(VENV); } && \
	  echo "Installing dsserve and its dependencies into $(VENV) (a few minutes the first time)" && \
	  $(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $(INSTALLED) $(BUILT)

# The guard: an installation has just built it, and make does not look again at a file it had found missing.
$(BUILT): $(INSTALLED) $(RUST_SOURCES)
	@if ! test -f $(BUILT) || test -n "$$(find $(RUST_SOURCES) -newer $(BUILT))"; then \
	  tools/preflight.sh >/dev/null && echo "Building the Rust extension" && \
	  $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable . && \
	  touch $(BUILT); fi
