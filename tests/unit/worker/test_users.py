"""What the worker does for another user, where that user has planted something."""

from __future__ import annotations

import hashlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from patience import PATIENCE_S
from trainmaster.protocol.account_files import User
from trainmaster.protocol.documents import read_document
from trainmaster.protocol.environment import ATTEMPT_ID
from trainmaster.protocol.launch import BlobFile, Launch, LaunchStep
from trainmaster.protocol.request import AttemptRequest, NodeAssignment
from trainmaster.protocol.run_directory import OWNER, RANKS_OWNER, RunDirectory
from trainmaster.protocol.secrets import NO_SECRETS
from trainmaster.worker.processes import die_with_parent
from trainmaster.worker.ranks import StartError, rank_environment, start_rank
from trainmaster.worker.staging import NodeContext, StagingError, stage
from trainmaster.worker.users import CannotBecomeError, acting_as, give_directory, open_own, user_of

UID = 61001
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


@pytest.fixture
def user() -> User:
    found = user_of(UID)
    assert found is not None
    return found


@pytest.fixture
def ground() -> Iterator[Path]:
    """A directory that every user may pass through; those of pytest are closed."""
    directory = Path(tempfile.mkdtemp(prefix="trainmaster-user-"))
    directory.chmod(0o711)
    (directory / "ours").mkdir(mode=0o755)
    (directory / "ours" / "file").write_text("ours")
    yield directory
    shutil.rmtree(directory)


def request_of(ground: Path, *blobs: BlobFile, **changes: object) -> AttemptRequest:
    launch = Launch(kind="command", steps=(LaunchStep(name="main", argv=("true",)),), blobs=blobs)
    values = {
        "job_id": "job-1",
        "attempt": 1,
        "token": "secret",
        "rank_token": "first",
        "launch": launch,
        "nodes": (NodeAssignment(node_id="n"),),
        "checkpoint_dir": str(ground / "artifacts" / "job-1" / "checkpoints"),
        "output_dir": str(ground / "artifacts" / "job-1" / "output"),
        "owner_file": str(ground / "runs" / "job-1" / RANKS_OWNER),
        "blob_dir": str(ground / "blobs"),
        "uid": UID,
    }
    return AttemptRequest(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture
def run(ground: Path) -> RunDirectory:
    directory = RunDirectory(ground / "runs" / "job-1" / "1")
    (ground / "artifacts").mkdir(mode=0o711)
    (ground / "blobs").mkdir(mode=0o700)
    directory.create(request_of(ground))
    (ground / "runs").chmod(0o711)
    return directory


def blob(ground: Path, path: str) -> BlobFile:
    content = b"shipped"
    digest = hashlib.sha256(content).hexdigest()
    (ground / "blobs" / digest).write_bytes(content)
    return BlobFile(sha256=digest, path=path)


def ours_is_untouched(ground: Path) -> bool:
    ours = ground / "ours"
    return os.listdir(ours) == ["file"] and (ours / "file").read_text() == "ours" and ours.stat().st_uid == 0


@as_root
def test_shipped_file_is_not_placed_through_a_planted_directory(ground: Path, run: RunDirectory, user: User) -> None:
    give_directory(run.path / "work", user)
    (run.path / "work" / "sub").symlink_to(ground / "ours")
    with pytest.raises(StagingError, match="sub/file"):
        stage(request_of(ground, blob(ground, "sub/file")), run.path, 0, lambda: None, user)
    assert ours_is_untouched(ground)


@as_root
def test_shipped_file_replaces_a_planted_link_and_belongs_to_the_user(
    ground: Path, run: RunDirectory, user: User
) -> None:
    give_directory(run.path / "work", user)
    placed = run.path / "work" / "file"
    placed.symlink_to(ground / "ours" / "file")
    stage(request_of(ground, blob(ground, "file")), run.path, 0, lambda: None, user)
    assert (placed.is_symlink(), placed.read_bytes(), placed.stat().st_uid) == (False, b"shipped", UID)
    assert ours_is_untouched(ground)


@as_root
@pytest.mark.parametrize("place", ["checkpoints", "output"])
def test_link_in_place_of_a_directory_is_not_made_over(ground: Path, run: RunDirectory, user: User, place: str) -> None:
    (ground / "artifacts" / "job-1").mkdir()
    (ground / "artifacts" / "job-1" / place).symlink_to(ground / "ours")
    with pytest.raises(StagingError):
        stage(request_of(ground), run.path, 0, lambda: None, user)
    assert ours_is_untouched(ground)


@as_root
@pytest.mark.parametrize("place", ["checkpoints", "output"])
def test_directory_with_files_of_another_user_is_not_made_over(
    ground: Path, run: RunDirectory, user: User, place: str
) -> None:
    """Before the account had a uid, a container of it may have left a setuid program there."""
    directory = ground / "artifacts" / "job-1" / place
    directory.mkdir(parents=True, mode=0o700)
    stage(request_of(ground), run.path, 0, lambda: None, user)  # an empty one is no risk
    os.chown(directory, 0, 0)
    program = directory / "program"
    program.write_bytes(b"")
    program.chmod(0o4755)
    with pytest.raises(StagingError, match=f"chown -R {UID} {directory}"):
        stage(request_of(ground), run.path, 0, lambda: None, user)
    assert directory.stat().st_uid == 0
    subprocess.run(["chown", "-R", str(UID), directory], check=True)
    stage(request_of(ground), run.path, 0, lambda: None, user)
    assert program.stat().st_mode & 0o7777 == 0o755, "the kernel takes the bit away with the owner"


@as_root
def test_what_a_job_fetches_prepares_and_saves_is_its_users_alone(ground: Path, run: RunDirectory, user: User) -> None:
    own = {
        "cache": ground / "cache" / "account",
        "checkpoints": ground / "artifacts" / "classes" / "account",
        "inputs": run.path / "nodes" / "0" / "inputs",
        "prepared": run.path / "nodes" / "0" / "prepared",
    }
    launch = Launch(kind="trainer", steps=(LaunchStep(name="main", argv=("true",)),), inputs={"training.json": "größe"})
    request = request_of(ground, launch=launch, cache_dir=str(own["cache"]), checkpoint_dir=str(own["checkpoints"]))
    stage(request, run.path, 0, lambda: None, user)
    stage(request, run.path, 0, lambda: None, user)  # as the next attempt finds it
    for directory in own.values():
        assert (directory.stat().st_uid, directory.stat().st_mode & 0o777) == (UID, 0o700)
        assert directory.parent.stat().st_uid == 0
        assert directory.parent.stat().st_mode & 0o022 == 0, "nobody else can put something in its place"
    assert (own["inputs"] / "training.json").stat().st_uid == UID
    with acting_as(user):
        assert (own["inputs"] / "training.json").read_text(encoding="utf-8") == "größe"
    other = user_of(UID + 1)
    for directory in own.values():
        with acting_as(other), pytest.raises(PermissionError):
            os.listdir(directory)


@as_root
def test_what_the_servers_own_user_fetches_and_saves_is_closed_to_the_users_of_others(
    ground: Path, run: RunDirectory, user: User
) -> None:
    cache, classes = ground / "cache", ground / "artifacts" / "classes"
    of_server = request_of(ground, uid=None, cache_dir=str(cache / "default"), checkpoint_dir=str(classes / "default"))
    of_account = request_of(ground, cache_dir=str(cache / "account"), checkpoint_dir=str(classes / "account"))
    stage(of_server, run.path, 0, lambda: None)
    stage(of_account, run.path, 0, lambda: None, user)
    for directory in (cache / "default", classes / "default"):
        with acting_as(user), pytest.raises(PermissionError):
            os.listdir(directory)


@as_root
@pytest.mark.parametrize("place", ["cache/account", "runs/job-1/1/nodes/0/inputs", "runs/job-1/1/nodes/0/prepared"])
def test_link_in_place_of_what_a_job_is_given_is_not_made_over(
    ground: Path, run: RunDirectory, user: User, place: str
) -> None:
    (ground / place).parent.mkdir(parents=True, exist_ok=True)
    (ground / place).symlink_to(ground / "ours")
    with pytest.raises((StagingError, OSError)):
        stage(request_of(ground, cache_dir=str(ground / "cache" / "account")), run.path, 0, lambda: None, user)
    assert ours_is_untouched(ground)


@as_root
def test_link_in_place_of_a_stream_is_not_written_through(ground: Path, user: User) -> None:
    (ground / "log").symlink_to(ground / "ours" / "file")
    with pytest.raises(OSError, match="symbolic links"):
        open_own(str(ground / "log"), user)
    assert ours_is_untouched(ground)


@as_root
def test_acting_as_a_user_has_its_rights_and_ends(ground: Path, user: User) -> None:
    (ground / "ours").chmod(0o700)
    with acting_as(user), pytest.raises(PermissionError):
        os.listdir(ground / "ours")
    assert os.listdir(ground / "ours") == ["file"]
    assert (os.geteuid(), os.getegid()) == (0, 0)


@as_root
def test_process_that_acted_as_a_user_still_dies_with_its_parent(user: User) -> None:
    told, says = os.pipe()
    parent = os.fork()
    if parent == 0:
        middle = os.getpid()
        if os.fork() == 0:
            die_with_parent(middle)
            with acting_as(user):
                pass
            os.write(says, str(os.getpid()).encode())
        signal.pause()
    assert os.read(told, 64).isdigit()
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    os.close(says)
    # The child has the other end, until it ends.
    ended, _, _ = select.select([told], [], [], 60)
    assert ended
    os.close(told)


@as_root
def test_attempt_is_closed_to_other_attempts_of_its_user(ground: Path, run: RunDirectory) -> None:
    own, other = run.request(), request_of(ground, attempt=2, rank_token="second")
    RunDirectory(run.path.with_name("2")).create(other)
    run.create(own)  # once more, as a server does that is not sure
    user = user_of(UID, run.ranks_group(own))
    assert user is not None
    give_directory(run.path / "work", user)
    os.close(open_own(str(run.path / "nodes" / "0" / "stream"), user))
    with acting_as(user):
        assert os.listdir(run.path / "work") == []
        with open(run.path / "nodes" / "0" / "stream", "a") as file:
            file.write("own")
    with acting_as(user_of(UID, other.group)):
        for path in (run.path / "work", run.path / "nodes" / "0" / "stream"):
            with pytest.raises(PermissionError):
                os.close(os.open(path, os.O_RDONLY))


@as_root
def test_ranks_read_a_copy_of_the_owner_that_the_server_does_not_believe(ground: Path, run: RunDirectory) -> None:
    copy = run.path.parent / RANKS_OWNER
    status = copy.stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (0, run.request().group, 0o640)
    copy.write_text('{"attempt": 99, "token": "forged"}')
    RunDirectory(run.path.with_name("2")).create(request_of(ground, attempt=2, rank_token="second"))
    assert read_document(copy) == read_document(run.path.parent / OWNER) == {"attempt": 2, "token": "second"}
    RunDirectory(run.path.with_name("3")).create(request_of(ground, attempt=3, rank_token="third", uid=None))
    assert not copy.exists()


def in_child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@as_root
def test_only_root_becomes_somebody_else() -> None:
    def try_it() -> None:
        os.setuid(UID)
        assert user_of(UID) is None
        with pytest.raises(CannotBecomeError, match=f"uid {UID}.*uid {UID + 1}"):
            user_of(UID + 1)

    assert in_child(try_it) == 0


def test_nobody_becomes_root() -> None:
    with pytest.raises(CannotBecomeError):
        user_of(0)


@as_root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="takes capabilities away with setpriv")
def test_sweep_finds_processes_of_users_where_root_may_not_look_into_them() -> None:
    mark = f"job-{os.urandom(4).hex()}.1"
    stray = subprocess.Popen(["sleep", "600"], env={ATTEMPT_ID: mark}, user=UID, group=UID, extra_groups=[])
    program = f"from trainmaster.worker.processes import sweep; print(sweep({mark!r}))"
    limited = ["setpriv", "--bounding-set=-sys_ptrace", sys.executable, "-c", program]
    try:
        swept = subprocess.run(limited, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
        assert swept.stdout == "1\n"
        assert stray.wait(PATIENCE_S) == -signal.SIGKILL
    finally:
        stray.kill()
        stray.wait()


def surroundings_in(directory: Path, ground: Path, run: RunDirectory, user: User) -> NodeContext:
    return NodeContext(
        request=request_of(ground),
        node=0,
        run_dir=run.path,
        working_directory=str(directory),
        control_file="",
        token_file="",
        kubeflow_url="",
        user=user,
    )


@as_root
def test_working_directory_that_became_a_link_leads_nowhere_the_user_cannot_go(
    ground: Path, run: RunDirectory, user: User
) -> None:
    """It was there when files were staged, and then another process of the user put a link in its place."""
    closed = ground / "closed"
    (closed / "inside").mkdir(parents=True)
    (closed / "inside" / "file").write_text("ours")
    closed.chmod(0o700)
    give_directory(ground / "home", user)
    with acting_as(user):
        (ground / "home" / "work").symlink_to(closed / "inside")
    around = surroundings_in(ground / "home" / "work", ground, run, user)
    step = LaunchStep(name="main", argv=("cat", "file"))
    with pytest.raises(StartError, match="cannot be entered"):
        start_rank(step, 0, around, NO_SECRETS, None)
    with acting_as(user):
        (ground / "home" / "work").unlink()
        (ground / "home" / "work").mkdir()
        (ground / "home" / "work" / "file").write_text("theirs")
    pid, _ = start_rank(step, 0, around, NO_SECRETS, None)
    assert os.waitpid(pid, 0)[1] == 0
    assert Path(around.log("main", 0, "out")).read_text() == "theirs"


@as_root
def test_step_with_tokens_does_not_have_the_shipped_files_as_its_home(
    ground: Path, run: RunDirectory, user: User
) -> None:
    work = ground / "work"
    around = surroundings_in(work, ground, run, user)
    homes = {
        guarded: rank_environment(around, 0, base=os.environ, rendezvous=None, guarded=guarded)["HOME"]
        for guarded in (False, True)
    }
    assert homes[False] == str(work)
    assert Path(homes[True]).parent == run.path / "nodes" / "0" / "prepared"
    assert not os.path.exists(homes[True])


@as_root
def test_setuid_programs_give_a_rank_no_rights(ground: Path, run: RunDirectory, user: User) -> None:
    program = ground / "ours" / "sh"
    shutil.copy("/bin/sh", program)
    program.chmod(0o4755)
    around = surroundings_in(ground / "ours", ground, run, user)
    step = LaunchStep(name="main", argv=(str(program), "-p", "-c", "id -u"))
    pid, _ = start_rank(step, 0, around, NO_SECRETS, None)
    assert os.waitpid(pid, 0)[1] == 0
    assert Path(around.log("main", 0, "out")).read_text() == f"{UID}\n"
