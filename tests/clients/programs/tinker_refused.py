"""What the latest `tinker` offers and this server does not do: each method's error, and how long that took."""

import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import tinker
from scenarios import ask, main, raised
from tinker_session import new_trainer


def refused() -> Any:
    service = tinker.ServiceClient(project_id="a-project")
    trainer = new_trainer(service)
    saved = trainer.save_state("saved").result().path
    rest, admin = tinker.RestClient(), tinker.AdminClient()
    day = datetime(2025, 1, 1, tzinfo=UTC)
    calls: dict[str, Callable[[], Any]] = {
        "ServiceClient.copy_weights": lambda: service.copy_weights(saved).result(),
        "TrainingClient.save_weights_external": lambda: trainer.save_weights_external("elsewhere").result(),
        "RestClient.copy_weights": lambda: rest.copy_weights(saved, "a-project").result(),
        "RestClient.export_session_trace": lambda: rest.export_session_trace(service.holder.get_session_id()).result(),
        "RestClient.get_audit_log": lambda: rest.get_audit_log().result(),
        "RestClient.get_billing_usage": lambda: rest.get_billing_usage(day, day).result(),
        "RestClient.get_external_weights_urls": lambda: rest.get_external_weights_urls(
            saved.replace("/weights/", "/external_weights/")
        ).result(),
        "RestClient.whoami": lambda: rest.whoami().result(),
        "AdminClient.get_audit_log": lambda: admin.get_audit_log().result(),
        "AdminClient.get_billing_usage": lambda: admin.get_billing_usage(day, day).result(),
    }
    found = {}
    for name, call in calls.items():
        began = time.monotonic()
        found[name] = {**raised(call), "seconds": time.monotonic() - began}
    # Nothing of it was counted: the model goes on.
    return {"errors": found, "next": trainer.save_state("after").result().path}


def left_behind() -> Any:
    """A client with a model that is killed in the middle of its work."""
    trainer = new_trainer()
    ask("kill me", pid=os.getpid(), model_id=trainer.model_id)


if __name__ == "__main__":
    main(refused, left_behind)
