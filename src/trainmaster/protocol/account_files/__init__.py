"""File operations below directories that a job or its account can write to.

A server that runs as root works there for accounts: it reads reports, lists and serves artifacts, links promoted
models, lays out files for a user and removes what is old. A job can replace any name that it may write to at any
moment: by a link to a file of root's, by a pipe that nobody writes to, by another directory. So everything here
descends from a directory of the server's, one descriptor at a time, and follows no link; what is neither a regular file
nor a directory counts as absent. Walks are iterative and hold one descriptor, however deep a tree is.

No other module of the server may chown, copy, link, rename, walk or remove files there;
`tests/unit/test_account_files_callers.py` checks that.
"""

from __future__ import annotations

from trainmaster.protocol.account_files.handover import (
    UnsafeFileError,
    User,
    UserDirectoryBuilder,
    give_file,
    make_directories_for,
    seal_tree,
)
from trainmaster.protocol.account_files.safe_open import (
    claim_directory,
    closing,
    directory_below,
    exists,
    make_directories,
    open_below,
    open_inside,
    open_plain,
    open_real,
    status_below,
)
from trainmaster.protocol.account_files.trees import (
    directories_in,
    files_in_order,
    has_entries,
    move,
    newest_in,
    remove,
    remove_tree,
    size_of,
)

__all__ = [
    "UnsafeFileError",
    "User",
    "UserDirectoryBuilder",
    "claim_directory",
    "closing",
    "directories_in",
    "directory_below",
    "exists",
    "files_in_order",
    "give_file",
    "has_entries",
    "make_directories",
    "make_directories_for",
    "move",
    "newest_in",
    "open_below",
    "open_inside",
    "open_plain",
    "open_real",
    "remove",
    "remove_tree",
    "seal_tree",
    "size_of",
    "status_below",
]
