"""The tables, as a new database gets them; a test checks that migrations lead to the same. Times are Unix seconds. A
unique key always holds the account, after the columns that are looked up, so that one index serves the scope of an
account and the scope of everything. Nodes, queues and the lease belong to the cluster."""

from __future__ import annotations

from sqlalchemy import ForeignKeyConstraint, UniqueConstraint, and_, false, text

from trainmaster.server.store.columns import (
    big_integers,
    flags,
    index,
    integers,
    keys,
    maybe_integers,
    maybe_numbers,
    maybe_texts,
    metadata,
    number_keys,
    numbers,
    of_a_job,
    of_a_session,
    of_an_account,
    rising_id,
    table,
    texts,
    where,
)

__all__ = ["metadata"]

# Jobs.

jobs = table(
    "jobs",
    keys("job_id", "account_id"),
    maybe_texts("handle"),
    texts("name", "labels", "created_by"),
    numbers("created_at"),
    maybe_texts("parent_job_id"),
    texts("root_job_id"),
    integers("spec_version"),
    texts("spec", "workload_kind", "lifetime", "backend", "queue"),
    integers("priority"),
    numbers("order_key"),
    texts("needs"),
    integers("max_retries"),
    flags("preemptible"),
    maybe_numbers("max_runtime_s", "inactivity_timeout_s"),
    maybe_texts("best_metric"),
    flags("best_is_greater"),
    texts("status", "desired"),
    maybe_texts("reason", "message"),
    integers("version", "event_count"),
    flags("can_save"),
    integers("retries_used", "preemptions_used"),
    maybe_numbers("queued_at"),
    numbers("not_before"),
    maybe_numbers("started_at", "finished_at", "paused_at"),
    numbers("updated_at", "status_at", "runtime_s", "gpu_s"),
    maybe_numbers("stalled_at"),
    numbers("last_save_s"),
    texts("progress"),
    maybe_texts("latest_checkpoint_id", "best_checkpoint_id"),
    maybe_numbers("best_metric_value"),
    maybe_texts("resume_checkpoint_id", "endpoint"),
    maybe_numbers("last_activity_at", "deleted_at"),
    flags("purge"),
    integers("attempt_count"),
    maybe_integers("attempt_number"),  # of the current attempt
    maybe_numbers("room_at"),
)
_DELETED, _NOT_DELETED = where("deleted_at IS NOT NULL"), where("deleted_at IS NULL")
_HAD_HANDLE = where("handle IS NOT NULL AND deleted_at IS NOT NULL")
_HAS_HANDLE = where("handle IS NOT NULL AND deleted_at IS NULL")
index("jobs_by_handle", jobs, "account_id", "handle", unique=True, **_HAS_HANDLE)
index("jobs_by_handle_once", jobs, "account_id", "handle", **_HAD_HANDLE)
index("jobs_by_age", jobs, "account_id", "created_at", "job_id", **_NOT_DELETED)
index("jobs_by_status_and_age", jobs, "account_id", "status", "created_at", "job_id", **_NOT_DELETED)
index("jobs_by_checkpoint", jobs, "resume_checkpoint_id", **where("resume_checkpoint_id IS NOT NULL"))
index("jobs_to_purge", jobs, "purge", "job_id", **_DELETED)
index("jobs_by_parent", jobs, "parent_job_id", **where("parent_job_id IS NOT NULL"))
index("jobs_by_status", jobs, "status", "queue", "order_key", "job_id")
index("jobs_with_room", jobs, "status", **where("room_at IS NOT NULL"))

job_labels = table(
    "job_labels",
    keys("job_id", "key", "account_id"),
    texts("value"),
    numbers("created_at", server_default="0"),  # of the job
    texts("marks", server_default=text("''")),  # of all labels of the job
    of_a_job(),
)
index("jobs_by_label", job_labels, "account_id", "key", "value", "created_at", "job_id", "marks")


# Attempts, and the resources that they hold.

attempts = table(
    "attempts",
    keys("job_id"),
    number_keys("number"),
    keys("account_id"),
    texts("token", "backend", "shares"),
    numbers("created_at"),
    maybe_texts("resume_checkpoint_id", "handle"),
    texts("claimed", "started", "exits", "offsets"),
    maybe_texts("stop"),
    flags("stop_save"),
    numbers("stop_grace_s"),
    maybe_numbers("stop_at"),
    flags("stack_dump"),
    maybe_numbers("started_at", "ended_at"),
    maybe_texts("reason", "message"),
    texts("evidence"),
    of_a_job(),
)
index("attempts_by_token", attempts, "token")
index("attempts_by_checkpoint", attempts, "resume_checkpoint_id", **where("ended_at IS NULL"))

is_current_attempt = and_(
    attempts.c.job_id == jobs.c.job_id,
    attempts.c.number == jobs.c.attempt_number,
    attempts.c.account_id == jobs.c.account_id,
)
"""Joins jobs with their current attempt."""

allocations = table(
    "allocations",
    keys("job_id"),
    number_keys("attempt", "member"),  # the member is a node of the gang
    keys("account_id"),
    texts("node_id"),
    integers("cpu_cores"),
    big_integers("ram_mb", "storage_mb"),
    of_a_job(),
)
index("allocations_by_node", allocations, "node_id")

allocated_gpus = table(
    "allocated_gpus",
    # A GPU is held once or not at all, whoever asks: this key is why no two jobs can ever share one.
    keys("node_id"),
    number_keys("gpu_index"),
    texts("job_id"),
    integers("attempt", "member"),
    texts("account_id"),
    of_a_job(),
)
index("allocated_gpus_by_job", allocated_gpus, "job_id")


# Events, activity, secrets and usage of a job.

events = table(
    "events",
    rising_id(),
    texts("job_id"),
    integers("seq"),
    texts("account_id"),
    numbers("at"),
    texts("type", "actor"),
    integers("attempt"),
    maybe_texts("from_status", "to_status", "reason"),
    texts("message", "data"),
    of_a_job(),
    UniqueConstraint("job_id", "seq", "account_id", name="events_by_job"),
    sqlite_autoincrement=True,
)

activity = table("activity", keys("job_id", "account_id"), numbers("at"), of_a_job())

secrets = table(
    "secrets",
    keys("job_id", "name", "account_id"),
    texts("sealed"),
    flags("until_end"),  # forgotten when the job ends
    of_a_job(),
)

usage = table(
    "usage",
    keys("job_id"),
    number_keys("attempt"),
    keys("account_id"),
    texts("queue"),
    numbers("started_at", "ended_at"),
    integers("gpus", "cpu_cores"),
    texts("labels"),
    of_a_job(),
)
index("usage_by_end", usage, "ended_at")
index("usage_by_account", usage, "account_id", "ended_at")


# Checkpoints, and the models promoted from them.

checkpoints = table(
    "checkpoints",
    keys("checkpoint_id", "account_id"),
    texts("job_id"),
    integers("attempt"),
    big_integers("step"),
    maybe_numbers("epoch"),
    numbers("created_at"),
    texts("metrics"),
    big_integers("size_bytes"),
    texts("root", "path", "status"),
    flags("pinned", server_default=false()),
    texts("kind", "name", server_default=text("''")),
    texts("attributes", server_default="{}"),
    maybe_numbers("expires_at"),
    flags("public", server_default=false()),
    of_a_job(),
)
index("checkpoints_by_job", checkpoints, "job_id", "created_at")
index("checkpoints_by_expiry", checkpoints, "expires_at", **where("expires_at IS NOT NULL"))
index("checkpoints_with_a_kind", checkpoints, "account_id", "created_at", **where("kind <> ''"))

promoted_models = table(
    "promoted_models",
    keys("model_id", "account_id"),
    texts("job_id", "checkpoint_id", "base_model", "kind", "details"),
    big_integers("size_bytes"),
    numbers("created_at"),
    of_a_job(),
)

operations = table(
    "operations",
    keys("operation_id", "account_id"),
    texts("request"),
    flags("done"),
    texts("error"),
    numbers("created_at", "worked_on_at"),
    of_an_account(),
)


# Files that clients uploaded, and the jobs that use them.

blobs = table("blobs", keys("sha256", "account_id"), big_integers("size_bytes"), numbers("created_at", "last_used_at"))

blob_uses = table(
    "blob_uses",
    keys("sha256", "job_id", "account_id"),
    of_a_job(),
    ForeignKeyConstraint(["sha256", "account_id"], ["blobs.sha256", "blobs.account_id"]),
)


# Accounts: API keys, webhooks and idempotency keys.

accounts = table(
    "accounts",
    keys("account_id"),
    numbers("created_at"),
    maybe_integers("uid"),  # the system user that runs its jobs on this machine
)

api_keys = table(
    "api_keys",
    keys("key_id", "account_id"),
    texts("name", "scopes", "hash"),
    numbers("created_at"),
    maybe_numbers("revoked_at"),
    texts("created_by", server_default=text("''")),
    of_an_account(),
    UniqueConstraint("hash", name="api_keys_by_hash"),  # a key belongs to one account
)

webhooks = table(
    "webhooks",
    keys("webhook_id", "account_id"),
    texts("url", "statuses"),
    texts("sealed"),  # the encrypted secret that signs deliveries
    numbers("created_at"),
    big_integers("cursor"),  # the last event that was delivered or given up
    integers("failures"),
    numbers("not_before"),
    maybe_numbers("delivered_at"),
    texts("problem"),
    integers("given_up"),
    of_an_account(),
)

idempotency = table("idempotency", keys("key", "account_id"), texts("fingerprint", "job_id"), numbers("created_at"))
index("idempotency_by_age", idempotency, "created_at")


# The cluster: nodes, queues, their events, and the leader's lease. These belong to no account.

nodes = table(
    "nodes",
    keys("node_id"),
    texts("backend", "hostname", "address"),
    integers("cpu_cores"),
    big_integers("ram_mb", "storage_mb"),
    texts("gpus", "labels", "capabilities"),
    integers("slots"),
    texts("state"),
    numbers("last_seen_at"),
    texts("given_labels", "given_capabilities", server_default="[]"),
    texts("drain_reason", server_default=text("''")),
    flags("drain_force", server_default=false()),
    maybe_numbers("drain_grace_s"),
    texts("pool", server_default=text("''")),
    integers("held_gpus", "held_cpu_cores", server_default="0"),
    big_integers("held_ram_mb", server_default="0"),
    maybe_numbers("time_limit_s"),
)

clusters = table(
    "clusters",
    keys("name"),
    texts("kind", "options", "sealed", "instance"),
    numbers("created_at", "changed_at"),
)

queues = table(
    "queues", keys("name"), numbers("created_at"), numbers("weight", server_default="1"), maybe_integers("quota_gpus")
)

cluster_events = table(
    "cluster_events", rising_id(), numbers("at"), texts("type", "subject", "message", "data"), sqlite_autoincrement=True
)
index("cluster_events_by_subject", cluster_events, "subject", "id")

leader = table(
    "leader",
    number_keys("id"),  # there is one row
    integers("epoch"),
    maybe_texts("holder"),
    texts("url"),
    numbers("expires_at"),
    maybe_numbers("since"),
)


# Sessions of Tinker clients, with their runs and samplers.

tinker_sessions = table(
    "tinker_sessions",
    keys("session_id", "account_id"),
    numbers("created_at"),
    maybe_texts("idempotency_key"),
    texts("tags", "user_metadata", "sdk_version"),
    maybe_texts("project_id", "display_name"),
    numbers("heartbeat_at"),
    maybe_numbers("finished_at"),
    texts("finish"),
    of_an_account(),
)
_KEYED = where("idempotency_key IS NOT NULL")
index("tinker_sessions_by_age", tinker_sessions, "account_id", "created_at")
index("tinker_sessions_open", tinker_sessions, "heartbeat_at", **where("finished_at IS NULL"))
index("tinker_sessions_by_key", tinker_sessions, "idempotency_key", "account_id", unique=True, **_KEYED)

tinker_runs = table(
    "tinker_runs",
    keys("model_id", "account_id"),
    texts("session_id", "base_model", "mode", "request"),
    numbers("created_at", "used_at"),
    texts("state"),
    maybe_texts("job_id"),
    maybe_integers("attempt"),  # of the job, whose trainer has the model
    texts("error", "category"),
    of_a_session(),
    of_a_job(),
)
index("tinker_runs_by_age", tinker_runs, "account_id", "created_at")
index("tinker_runs_by_session", tinker_runs, "session_id")

tinker_samplers = table(
    "tinker_samplers",
    keys("sampler_id", "account_id"),
    texts("session_id", "base_model"),
    maybe_texts("model_path"),
    numbers("created_at"),
    of_a_session(),
)
index("tinker_samplers_by_session", tinker_samplers, "session_id")
