#!/bin/sh
# Installs Slurm, on which the tests of its backend start clusters of their own, where it is missing and this is a
# Debian with root. Elsewhere it says what to install, and the tests that need it are skipped; with REQUIRE_SLURM, as in
# CI, it fails.
set -eu

for program in munged slurmctld slurmd slurmrestd sbatch; do
    # Daemons are in sbin, which is not on everybody's PATH.
    if ! PATH="$PATH:/usr/sbin:/sbin" command -v "$program" >/dev/null 2>&1; then
        missing=$program
    fi
done
if [ -z "${missing:-}" ]; then
    exit 0
fi
sudo=
if [ "$(id -u)" != 0 ] && command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
    sudo="sudo -n"
fi
if command -v apt-get >/dev/null 2>&1 && { [ "$(id -u)" = 0 ] || [ -n "$sudo" ]; }; then
    echo "installing slurm" >&2
    $sudo apt-get update -qq
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        munge slurmctld slurmd slurmrestd slurm-client slurm-wlm-basic-plugins slurm-wlm-jwt-plugin >/dev/null
else
    echo "no $missing: install munge, slurmctld, slurmd, slurmrestd and Slurm's client programs to run the tests on Slurm" >&2
    [ -z "${REQUIRE_SLURM:-}" ]
fi
