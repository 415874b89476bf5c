#!/bin/sh
# Prepares .venvs/: the public clients that the tests drive, each in an environment of its own, as their dependencies
# conflict. Needs .venv, whose pip installs into all of them.
set -eu
cd "$(dirname "$0")/.."
# 2.14 and later bring gigabytes of CUDA with them on machines without a GPU.
torch='torch>=2.8,<2.14'

# prepare NAME REQUIREMENT...: makes .venvs/NAME anew, unless it was made from the same requirements.
prepare() {
    name="$1"
    shift
    stamp=".venvs/$name/.requirements"
    if [ -x ".venvs/$name/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$*" ]; then
        return
    fi
    echo "installing $* into .venvs/$name" >&2
    rm -rf ".venvs/$name"
    .venv/bin/python -m venv --without-pip ".venvs/$name"
    sh scripts/install.sh ".venvs/$name/bin/python" -q "$@"
    echo "$*" >"$stamp"
}

mkdir -p .venvs
tinker='tinker>=0.36,<0.37'
prepare cookbook "tinker-cookbook[math-rl]==0.5.8" "$tinker" "$torch"
prepare tinker "$tinker"
prepare fireworks "fireworks-ai[training-sdk]>=1.2.28,<1.3" "$torch"
prepare tinker-0.24.1 tinker==0.24.1
prepare tinker-0.25.0 tinker==0.25.0
prepare kubeflow "kubeflow[docker]==0.5.0" "httpx>=0.27,<1" "rich>=13.9" # the last two: for our backend behind it
# Not a client: the GPU's kernels run in its interpreter. It stays out of .venv, where PyTorch for CPUs has none either.
# The tests replace a function of this version's interpreter.
if [ "$(uname -s)" = Linux ]; then
    prepare triton "triton>=3.9,<3.10"
fi
