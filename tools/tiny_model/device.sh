#!/usr/bin/env bash
# Environment of a training run on a GPU machine without a network: wheels of .whl, compile cache kept under .tinyrun or carried there.
set -e
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl
export PYTHONPATH=/tmp/site:python:kernels:. PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=4
export TORCHINDUCTOR_CACHE_DIR=/tmp/inductor
if [ -f .tinyrun/cache.tgz ] && [ ! -d /tmp/inductor ]; then mkdir -p /tmp/inductor && tar xzf .tinyrun/cache.tgz -C /tmp/inductor; fi
"$@"
