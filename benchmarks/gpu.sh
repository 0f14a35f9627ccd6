#!/bin/bash
# How the scripts do on a GPU, in one command of at most ten minutes and without a network: see gpu.py.
#   bash benchmarks/gpu.sh [OUT.json] [--device cpu --toy]        (PYTHON=... chooses another Python)
set -eu
HERE=$(cd "$(dirname "$0")" && pwd)
exec "${PYTHON:-python3}" "$HERE/gpu.py" "$@"
