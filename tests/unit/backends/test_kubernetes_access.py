"""What is done about requests that the API server refuses."""

from __future__ import annotations

from trainmaster.backends.kubernetes import access, manifests
from trainmaster.backends.kubernetes.connection import KubernetesRefusedError


def test_owner_that_only_others_may_change_is_tried_again() -> None:
    """With the admission plugin OwnerReferencesPermissionEnforcement: the garbage collector removes the Secret soon."""
    words = 'secrets "tm-1" is forbidden: cannot set an ownerRef on a resource you can\'t delete: , <nil>'
    assert access.is_transient(KubernetesRefusedError(403, "Forbidden", words))
    assert not access.is_transient(KubernetesRefusedError(403, "Forbidden", 'secrets "tm-1" is forbidden'))


def test_making_what_a_job_owns_takes_no_right_to_the_finalizers_of_the_job() -> None:
    """The same plugin asks for that right where the deletion of the owner is to wait for what it owns."""
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "tm-1", "uid": "u"}}
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "tm-1", "uid": "u", "controller": True}
    assert manifests.owner_of(job) == owner
