#!/bin/sh
# Checks updates on a GPU: eager = CUDA graph for every learner. Needs torch, NumPy and safetensors, nothing else.
# Under five minutes on one GPU. --cpu: the same checks with the compiler in the place of the graph, without a GPU.
set -eu
cd "$(dirname "$0")/.."
PYTHONPATH=. exec "${PYTHON:-python3}" benchmarks/gpu_check.py "$@"
