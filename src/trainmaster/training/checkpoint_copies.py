"""A copy of every checkpoint for each further node, where a job wants all nodes to save."""

from __future__ import annotations

import os
import shutil

from trainmaster.jobs.checkpoint_retention import to_remove
from trainmaster.jobs.reporter import Reporter
from trainmaster.jobs.roots import Root
from trainmaster.protocol import environment


class NodeCopies:
    """Commits copies below `node-<index>`, in the first rank of each node but the first. They are not registered."""

    def __init__(self, root: Root, reporter: Reporter, *, keep: int) -> None:
        self._root = root
        self._reporter = reporter
        self._keep = keep
        self._node = int(os.environ.get(environment.NODE, "0"))
        self._copies = self._node > 0 and os.environ.get("LOCAL_RANK", "0") == "0"

    def make(self, rel_path: str) -> None:
        """Copy a committed checkpoint, if that is this rank's part."""
        manifest = self._root.manifest(rel_path) if self._copies else None
        if manifest is None:
            return
        home = f"node-{self._node}"
        target = f"{home}/{rel_path}"
        made = self._root.draft(
            target, job_id=manifest.job_id, attempt=manifest.attempt, expected_bytes=manifest.size_bytes
        )
        with made as draft, self._root.fetch(rel_path, verify=False) as source:
            for file in manifest.files:
                (draft / file.path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / file.path, draft / file.path)
            self._root.commit(draft, target, manifest, check_owner=self._reporter.require_ownership)
        for old in to_remove(self._root.committed(home), limit=self._keep):
            self._root.remove(old)
