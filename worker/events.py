"""Every event this package logs: its name, its level and the fields it carries.

Code and tests use these constants. The names are a contract: people build alerts on them. Payloads are in
no event, and never will be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Event:
    """One kind of log line. `fields` are the names it is documented with; fewer or more may be sent."""

    name: str
    level: Level
    fields: tuple[str, ...] = ()


_JOB = ("job_id", "kind", "queue", "attempt", "fence")
_RAN = (*_JOB, "duration_ms")
_FAILED = (*_RAN, "error", "error_type", "exception")
_TROUBLE = ("error", "error_type", "exception")

# Life of the process
DAEMON_STARTED = Event("daemon_started", "info", ("name", "queues", "workers", "lease_seconds", "schema"))
DAEMON_READY = Event("daemon_ready", "info", ("kinds",))
SHUTDOWN_STARTED = Event("shutdown_started", "info", ("reason", "running", "grace_seconds"))
SHUTDOWN_COMPLETE = Event("shutdown_complete", "info", ("status", "uptime_ms"))
CONFIG_INVALID = Event("config_invalid", "error", ("error", "exception"))
SETTING_UNKNOWN = Event("setting_unknown", "warning", ("setting", "nearest"))
INTERNAL_ERROR = Event("internal_error", "error", ("where", *_TROUBLE))
CHAOS_ENABLED = Event("chaos_enabled", "warning", ("crash", "latency"))
LOOP_BLOCKED = Event("loop_blocked", "warning", ("blocked_seconds", "kind", "stack"))

# Life of a job
JOB_CLAIMED = Event("job_claimed", "debug", _JOB)
JOB_SUCCEEDED = Event("job_succeeded", "info", _RAN)
JOB_FAILED = Event("job_failed", "warning", (*_FAILED, "retry_in_seconds"))
JOB_DEAD = Event("job_dead", "error", _FAILED)
JOB_SNOOZED = Event("job_snoozed", "info", (*_RAN, "retry_in_seconds"))
# reason: shutdown | not_started | unknown_kind | suspect_waits | claim_lost | requested (over HTTP)
JOB_RELEASED = Event("job_released", "info", (*_RAN, "reason"))
# reason: lease_lost | lease_untrusted | cancelled | deaf_handler
JOB_ABANDONED = Event("job_abandoned", "warning", (*_RAN, "reason"))
EFFECT_ALREADY_APPLIED = Event("effect_already_applied", "warning", (*_RAN, "key"))
HANDLER_FAILED_AFTER_COMMIT = Event("handler_failed_after_commit", "error", _FAILED)
UNKNOWN_KIND = Event("unknown_kind", "warning", ("kind", "queue", "jobs"))
LEASE_EXPIRED = Event("lease_expired", "warning", (*_JOB, "state", "outcome", "lost_worker"))

# A named lease that is left to expire
LEASE_NOT_RELEASED = Event("lease_not_released", "warning", ("lease", "fence", "error", "error_type"))

# The database and the loops that talk to it
DATABASE_LOST = Event("database_lost", "warning", ("error", "error_type"))
DATABASE_RESTORED = Event("database_restored", "info", ("lost_seconds",))
CLAIM_FAILED = Event("claim_failed", "warning", _TROUBLE)
RENEW_FAILED = Event("renew_failed", "warning", (*_TROUBLE, "held"))
COMPLETION_DEFERRED = Event("completion_deferred", "warning", (*_TROUBLE, "waiting"))
FAILURE_UPDATE_FAILED = Event("failure_update_failed", "warning", (*_JOB, *_TROUBLE))
REAPER_FAILED = Event("reaper_failed", "warning", _TROUBLE)
LISTENER_LOST = Event("listener_lost", "warning", ("error", "error_type"))
LISTENER_RESTORED = Event("listener_restored", "info", ())

# The generator
GENERATOR_STARTED = Event("generator_started", "info", ("name", "schema", "lease_seconds"))
# reason: stopped | held
GENERATOR_STANDBY = Event("generator_standby", "info", ("reason", "holder"))
GENERATOR_LEADER = Event("generator_leader", "info", ("fence",))
GENERATOR_PRODUCED = Event("generator_produced", "debug", ("jobs", "fence"))
GENERATOR_SKIPPED = Event("generator_skipped", "warning", ("slots", "fence"))
GENERATOR_FAILED = Event("generator_failed", "warning", ("error", "error_type", "slots", "fence"))
GENERATOR_LOST = Event("generator_lost", "warning", ("reason", "fence"))
GENERATOR_RELEASED = Event("generator_released", "info", ("fence",))

# The HTTP interface
HTTP_STARTED = Event("http_started", "info", ("host", "port", "tokens"))
HTTP_PORT_TAKEN = Event("http_port_taken", "error", ("error",))
HTTP_READY = Event("http_ready", "info", ())
_REQUEST = ("method", "route", "status", "duration_ms", "client", "job_id")
HTTP_REQUEST = Event("http_request", "info", _REQUEST)
# The same for what a remote worker asks all the time and was answered well: its jobs have events of their own.
HTTP_TASK_REQUEST = Event("http_request", "debug", _REQUEST)
HTTP_STOPPED = Event("http_stopped", "info", ("requests",))

# What others say in this process, and what nobody could be told
PRINT = Event("print", "info", ("message", "stream"))
WARNING = Event("warning", "warning", ("message", "category", "where"))
LOG = Event("log", "info", ("message", "logger", "exception"))
LOG_LINES_DROPPED = Event("log_lines_dropped", "warning", ("lines",))

ALL: tuple[Event, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Event))
