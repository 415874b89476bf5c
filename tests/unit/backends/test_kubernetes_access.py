"""What is said of requests that the API server refuses."""

from __future__ import annotations

from trainmaster.backends.kubernetes import access
from trainmaster.backends.kubernetes.connection import KubernetesRefusedError


def test_right_to_own_is_named_where_the_api_server_checks_it() -> None:
    """With the admission plugin OwnerReferencesPermissionEnforcement."""
    words = (
        'secrets "tm-1" is forbidden: cannot set blockOwnerDeletion if an ownerReference refers to a resource you '
        "can't set finalizers on: , <nil>"
    )
    said = access.refusal(KubernetesRefusedError(403, "Forbidden", words), "job", "team")
    assert words in said
    assert "`kubectl create role trainmaster-owners -n team --verb=update --resource=jobs.batch/finalizers`" in said
