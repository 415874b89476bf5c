#!/bin/sh
# Installs the container engine that the tests run real containers with: podman, where it is missing and this is a
# Debian with root. Elsewhere it says what to install, and the tests that need an engine are skipped; with
# REQUIRE_CONTAINERS, as in CI, it fails. With `docker` as its argument it installs docker's engine too, on which a few
# tests run that are skipped otherwise.
set -eu

docker=
if [ "${1:-}" = docker ] && ! command -v dockerd >/dev/null 2>&1; then
    docker=docker.io
fi
if [ -z "$docker" ] && command -v podman >/dev/null 2>&1 && command -v runc >/dev/null 2>&1; then
    exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing podman $docker" >&2
    apt-get update -qq
    # netavark and aardvark-dns give containers of one network names; both have to be there before podman runs first.
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        podman runc netavark aardvark-dns catatonit iptables $docker >/dev/null
else
    echo "no container engine: install podman, runc, netavark and aardvark-dns to run the tests in containers" >&2
    [ -z "${REQUIRE_CONTAINERS:-}" ]
fi
