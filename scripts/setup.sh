#!/bin/sh
# Prepares .venv with Trainmaster and its extras: `train` to run jobs (the default), `dev` for all that the tests need,
# which includes the public clients in .venvs and a container engine.
set -eu
cd "$(dirname "$0")/.."
extra="${1:-train}"
python="${PYTHON:-python3}"
# The tests run jobs as other users, who cannot run a Python below somebody's home directory.
if [ "$extra" = dev ] && [ -z "${PYTHON:-}" ] &&
    /usr/bin/python3 -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=/usr/bin/python3
fi
stamp=".venv/.trainmaster-$extra"

ready() {
    [ -f "$stamp" ] && [ "$stamp" -nt pyproject.toml ] && .venv/bin/python -c 'import trainmaster' 2>/dev/null
}

if [ "$extra" != dev ] && ready; then
    exit 0
fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "Trainmaster needs Python 3.11 or newer; '$python' is $("$python" -V 2>&1). Set PYTHON=... to another one." >&2
    exit 1
}

# Debian ships venv without the part that installs pip unless python3-venv is there too.
make_venv() {
    if "$python" -c 'import ensurepip' 2>/dev/null; then
        "$python" -m venv .venv
    elif command -v virtualenv >/dev/null 2>&1; then
        virtualenv --quiet --python "$python" .venv
    elif command -v uv >/dev/null 2>&1; then
        uv venv --quiet --seed --python "$python" .venv
    else
        return 1
    fi
}

if ! [ -x .venv/bin/pip ]; then
    rm -rf .venv
    if ! make_venv; then
        if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
            echo "installing python3-venv" >&2
            apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-venv >/dev/null
            make_venv
        else
            echo "Python's venv module cannot install pip here: run 'sudo apt-get install python3-venv', then 'make setup'." >&2
            exit 1
        fi
    fi
fi
if ! [ -x .venv/bin/uv ]; then
    .venv/bin/pip install -qq --disable-pip-version-check "uv>=0.8" || true
fi
if [ "$extra" = dev ]; then
    sh scripts/clients.sh &
    clients=$!
    sh scripts/containers.sh
    sh scripts/slurm.sh
fi
if ! ready; then
    echo "installing Trainmaster into .venv, PyTorch included (this takes a minute or two)" >&2
    # Not quiet: a terminal shows a bar. Users get bytecode too, or their first job would wait for it; the tests import
    # few of the modules.
    if [ "$extra" != dev ]; then
        export UV_COMPILE_BYTECODE=1
    fi
    sh scripts/install.sh .venv/bin/python -e ".[$extra]" >&2
    touch "$stamp"
fi
if [ "$extra" = dev ]; then
    # While the clients are installed: the first check of types, which takes a minute and leaves a cache for
    # `make check`, and the bytecode that every process of the tests would otherwise compile for itself.
    if ! [ -d .mypy_cache ]; then
        .venv/bin/python -c 'import schemathesis, trainmaster.server.app, trainmaster.training.sft, trainmaster.engine.engine' &
        .venv/bin/mypy >/dev/null 2>&1 || true
        wait $! || true
    fi
    wait "$clients"
fi
