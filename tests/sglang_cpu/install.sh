#!/usr/bin/env bash
# Installs a real SGLang server that runs without an accelerator into the virtual environment $1 (default .venv-sglang), with $2 (default
# python3.11; SGLang's wheels are for 3.10 to 3.13). Takes 3.5 GB of disk and some minutes. For tests of the client and of weight sync: no speed of this server means anything.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
environment=${1:-.venv-sglang}
[ -x "$environment/bin/python" ] || "${2:-python3.11}" -m venv "$environment"
pip=("$environment/bin/python" -m pip install --quiet --disable-pip-version-check)
"${pip[@]}" torch==2.13.0 transformers==5.19.0 triton tensorstore safetensors -r "$here/requirements.txt"
# Without their dependencies, which are CUDA's.
"${pip[@]}" --no-deps sglang==0.5.23 xgrammar==0.2.7 torchvision==0.28.0
site=$("$environment/bin/python" -c 'import site; print(site.getsitepackages()[0])')
rm -rf "$site/sgl_kernel"
cp -r "$here/stand_ins/." "$site/"
# SGLang looks up the version of its kernels' distribution.
mkdir -p "$site/sgl_kernel-0.4.10.dist-info"
printf 'Metadata-Version: 2.1\nName: sgl-kernel\nVersion: 0.4.10\n' > "$site/sgl_kernel-0.4.10.dist-info/METADATA"
