#!/bin/bash
# Installs the peers of compare.py, each into an environment of its own, and builds the models that all contestants run.
#   benchmarks/speed/install_peers.sh FOLDER        (Python 3.11; about 6 GB of disk; nothing outside FOLDER changes)
# torch comes first: to get a build without CUDA, have pip find a CPU wheel, e.g. by PIP_INDEX_URL=https://download.pytorch.org/whl/cpu
set -eu
mkdir -p "${1:?usage: install_peers.sh FOLDER}"
HERE=$(cd "$(dirname "$0")" && pwd)
cd "$1"
python3 -m venv trl_old
trl_old/bin/pip install -q torch==2.13.0
trl_old/bin/pip install -q trl==0.11.4 transformers==4.45.2 accelerate==0.34.2 peft==0.13.2 'datasets<4' 'numpy<2.3' rich psutil tyro
python3 -m venv trl_new
trl_new/bin/pip install -q torch==2.13.0
trl_new/bin/pip install -q trl==1.16.0 transformers==5.23.0 accelerate==1.15.0 datasets==5.2.0
trl_new/bin/pip install -q --no-deps --target trl_1_12 trl==1.12.0  # the last release with experimental.ppo; runs in trl_new
trl_old/bin/python "$HERE/build_models.py" models
