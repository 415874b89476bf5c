#!/bin/sh
# Prepares .venvs/ray: the Ray that the tests start clusters with. It takes 400 MB. Trainmaster itself needs no Ray.
# Needs .venv, whose pip installs into it.
set -eu
cd "$(dirname "$0")/.."
requirement="ray[default]==2.60.0"
stamp=.venvs/ray/.requirements

if [ -x .venvs/ray/bin/ray ] && [ "$(cat "$stamp" 2>/dev/null)" = "$requirement" ]; then
    exit 0
fi
echo "installing $requirement into .venvs/ray" >&2
rm -rf .venvs/ray
mkdir -p .venvs
.venv/bin/python -m venv --without-pip .venvs/ray
sh scripts/install.sh .venvs/ray/bin/python -q "$requirement"
echo "$requirement" >"$stamp"
