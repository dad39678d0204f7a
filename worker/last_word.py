"""The last word about an attempt: its lease is over, the log says how, and a failure hook hears of it."""

from __future__ import annotations

from collections.abc import Callable

from worker import events, logs
from worker.committing import Finished
from worker.domain import Failed, Released, Snoozed
from worker.events import Event
from worker.holding import Holdings
from worker.job import Job

FailureListener = Callable[["Job[object]", BaseException, bool], None]


class LastWord:
    """Says it once for each outcome, after the database has acknowledged or refused it."""

    def __init__(self, holdings: Holdings, on_failed: FailureListener | None) -> None:
        self._holdings = holdings
        self._on_failed = on_failed
        self._untold: list[Finished] = []

    def succeeded(self, one: Finished) -> None:
        """Done: nothing is renewed any more. It is told with others by the next `tell`."""
        self._holdings.remove(one.held)
        self._untold.append(one)

    def tell(self) -> None:
        """Log those that have succeeded."""
        if self._untold:
            untold, self._untold = self._untold, []
            if logs.is_on(events.JOB_SUCCEEDED):
                logs.emit_each(
                    events.JOB_SUCCEEDED, [{**one.held.job.log_fields(), "duration_ms": one.duration_ms} for one in untold]
                )

    def end(self, one: Finished, event: Event, **fields: object) -> None:
        """Settled: nothing is renewed any more, and everybody may know."""
        self._holdings.remove(one.held)
        self.log(one, event, **fields)

    def log(self, one: Finished, event: Event, **fields: object) -> None:
        """An event about this attempt."""
        logs.emit(event, **one.held.job.log_fields(), duration_ms=one.duration_ms, **fields)

    def settled(self, one: Finished, state: str, delay_seconds: float) -> None:
        """A failed, snoozed or released attempt is written; `state` is the job's."""
        match one.outcome:
            case Failed() as failed:
                dead = state == "dead"
                fields: dict[str, object] = {} if dead else {"retry_in_seconds": round(delay_seconds, 3)}
                self.end(
                    one,
                    events.JOB_DEAD if dead else events.JOB_FAILED,
                    error=failed.error,
                    error_type=failed.error_type,
                    exception=failed.detail,
                    **fields,
                )
                job = one.job
                if self._on_failed is not None and job is not None and failed.exception is not None:
                    self._on_failed(job, failed.exception, not dead)
            case Snoozed():
                self.end(one, events.JOB_SNOOZED, retry_in_seconds=delay_seconds)
            case Released() as released:
                self.end(one, events.JOB_RELEASED, reason=released.reason)
