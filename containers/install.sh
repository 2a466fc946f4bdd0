#!/bin/sh
# Of both container files: everything that requirements.lock pins, and this package, into /opt/xgram-dist.
# TORCH: what pip is asked for in place of the lock's torch, with all it requires.
set -eu
export DEBIAN_FRONTEND=noninteractive PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
apt-get update -qq
# The compiler and the headers of Python are for torch.compile.
apt-get install -y -qq --no-install-recommends ca-certificates g++ make python3-dev python3-venv
rm -rf /var/lib/apt/lists/*
python3 -m venv /opt/xgram-dist
pip=/opt/xgram-dist/bin/pip
# shellcheck disable=SC2086  # several words
$pip install $TORCH
grep -v '^torch==' /src/requirements.lock > /tmp/rest.lock
$pip install --no-deps -r /tmp/rest.lock
$pip install --no-deps --no-build-isolation /src
rm -rf /src /tmp/rest.lock
/opt/xgram-dist/bin/xgram-dist --version
