#!/bin/sh
# install.sh PYTHON ARGUMENT...: `pip install ARGUMENT...` into the environment of PYTHON. uv does the same in a tenth of
# the time, but does not read pip's settings: it gets pip's indexes from here. Where uv is missing or fails, pip installs.
set -eu
python="$1"
shift

# setting NAME: what pip's variables and files say. Variables come first in the list, and win.
settings="$(.venv/bin/pip config list 2>/dev/null || true)"
setting() {
    printf '%s\n' "$settings" | sed -n "s/^[^=]*\.$1='\(.*\)'\$/\1/p" | head -n 1
}

if [ -x .venv/bin/uv ]; then
    index="$(setting index-url)"
    if [ -n "$index" ]; then
        export UV_DEFAULT_INDEX="$index"
    fi
    if UV_EXTRA_INDEX_URL="$(setting extra-index-url)" UV_FIND_LINKS="$(setting find-links | tr ' ' ',')" \
        UV_INDEX_STRATEGY=unsafe-best-match .venv/bin/uv pip install --python "$python" "$@"; then
        exit 0
    fi
    echo "installing with pip, as uv failed" >&2
fi
.venv/bin/pip --python "$python" install --disable-pip-version-check "$@"
