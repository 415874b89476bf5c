"""Slurm's accounting for tests: slurmdbd with a database of its own, below the directory of a cluster."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator

from slurm_cluster import SEARCHED, SlurmCluster, free_ports, running_cluster, wait_for

_PROGRAMS = ("mariadbd", "mariadb-install-db", "mariadb", "slurmdbd", "sacctmgr", "sacct")
_SLURMDBD = """
AuthType=auth/munge
AuthInfo=socket={d}/munge.socket
AuthAltTypes=auth/jwt
AuthAltParameters=jwt_key={d}/jwt.key
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={dbd}
SlurmUser=root
LogFile={d}/slurmdbd.log
PidFile={d}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={db}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm
"""
_CONF = """
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={dbd}
AccountingStoragePass={d}/munge.socket
AccountingStorageEnforce=associations,qos
"""


def missing() -> str | None:
    """Why there is no accounting here; None where there is."""
    absent = [name for name in _PROGRAMS if shutil.which(name, path=SEARCHED) is None]
    return f"{', '.join(absent)}: install mariadb-server, slurmdbd and slurm-wlm-mysql-plugin" if absent else None


@contextlib.contextmanager
def accounted_cluster() -> Iterator[SlurmCluster]:
    """A cluster that forgets ended jobs within seconds, and whose accounting does not."""
    dbd, database = free_ports(2)
    with running_cluster(begin=lambda cluster: _start(cluster, dbd, database)) as cluster:
        cluster.run("sacctmgr", "--immediate", "add", "account", "team", "Cluster=test")
        cluster.run("sacctmgr", "--immediate", "add", "user", "root", "Account=team")
        yield cluster


def _start(cluster: SlurmCluster, dbd: int, database: int) -> None:
    place = cluster.directory
    conf = cluster.conf.read_text().replace("MinJobAge=86400", "MinJobAge=2")
    cluster.conf.write_text(conf + _CONF.format(dbd=dbd, d=place))
    settings = place / "slurmdbd.conf"
    settings.write_text(_SLURMDBD.format(d=place, dbd=dbd, db=database, host=socket.gethostname().partition(".")[0]))
    settings.chmod(0o600)
    own = [f"--datadir={place}/mysql", "--user=root"]
    install = ["mariadb-install-db", "--no-defaults", *own, "--auth-root-authentication-method=normal"]
    subprocess.run(install, check=True, capture_output=True)
    listen = [f"--port={database}", "--bind-address=127.0.0.1", f"--socket={place}/mysql.socket"]
    cluster.start_daemon("mariadbd", "mariadbd", "--no-defaults", *own, *listen)
    asked = ["mariadb", "--no-defaults", "--user=root", f"--socket={place}/mysql.socket"]
    user = "CREATE USER slurm@'127.0.0.1' IDENTIFIED BY 'slurm'; GRANT ALL ON slurm.* TO slurm@'127.0.0.1'"
    environment = {**os.environ, "PATH": SEARCHED}

    def answers() -> bool:
        done = subprocess.run([*asked, "--execute", user], check=False, capture_output=True, env=environment)
        return done.returncode == 0

    wait_for(answers, "mariadbd")
    cluster.start_daemon("slurmdbd", "slurmdbd", "-D")
    log = place / "slurmdbd.log"
    wait_for(lambda: log.exists() and "started" in log.read_text(), "slurmdbd")
