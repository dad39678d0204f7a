"""TaskClient: a remote worker. It claims tasks of a `worker serve` and runs them under leases that it keeps alive.

    async def thumbnail(task: RemoteTask) -> object:
        task.ensure_lease(for_seconds=10)               # right before an external side effect; task.fence goes with it
        return {"pages": 3}                             # the task's output

    async with TaskClient("https://jobs.internal", bearer=token, processor="thumbnails-1") as tasks:
        await tasks.run(thumbnail, queue="thumbnails", concurrency=4)

The rules are those of the daemon. A lease is trusted until (local moment before the request) + what the answer says is left − a
tenth; it is renewed at a third of its length, and the handler is cancelled when the server says that the lease is gone, or when the
trust has run out without an answer. An end that could not be told is told again until the server takes or refuses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from worker.clock import local_seconds
from worker.domain import describe
from worker.domain_json import encode_json
from worker.errors import ConfigError, LeaseLost
from worker.http_calls import delay_seconds
from worker.masking import safe_text
from worker.task_calls import LEASE_SECONDS, TaskCalls, renew_in_seconds
from worker.task_calls import RemoteTask as RemoteTask

IDLE_SECONDS = 1.0
_TELL_LEASES = 10
_TELL_AT_LEAST_SECONDS = 60.0
_log = logging.getLogger("worker.tasks")

Ended = Literal["completed", "failed", "released", "lost"]
Handler = Callable[[RemoteTask], Awaitable[object]]


class TaskClient(TaskCalls):
    """One remote worker. Use it with `async with`.

    `processor`, of 1 to 128 bytes, names it; two that share a name can end each other's tasks only with the other's fence. By
    default it is the host's name, the process id and random digits. Raises ConfigError for an address, a token or a name that
    cannot be right.
    """

    def __init__(
        self,
        url: str,
        *,
        bearer: str | None = None,
        processor: str | None = None,
        timeout_seconds: float = 10.0,
        connections: int = 16,
    ) -> None:
        super().__init__(url, bearer=bearer, processor=processor, timeout_seconds=timeout_seconds, connections=connections)

    async def run(
        self,
        handler: Handler,
        *,
        queue: str = "default",
        kinds: Sequence[str] | None = None,
        lease_seconds: float = LEASE_SECONDS,
        concurrency: int = 1,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        """Claim and run until cancelled; what runs then is cancelled and given back. Waits out an absent server.

        Raises ConfigError and ValueError for what waiting cannot mend, once everything has been given back.
        """
        if concurrency < 1:
            raise ValueError(f"concurrency: {concurrency} is not 1 or more")

        async def lane() -> None:
            failures = 0
            while True:
                try:
                    ended = await self.run_one(handler, queue=queue, kinds=kinds, lease_seconds=lease_seconds)
                except ConnectionError as error:
                    failures += 1
                    _log.warning("no answer: %s", error)
                    await asyncio.sleep(delay_seconds(failures))
                else:
                    failures = 0
                    if ended is None:
                        await asyncio.sleep(idle_seconds * random.uniform(0.8, 1.2))

        try:
            async with asyncio.TaskGroup() as group:
                for number in range(concurrency):
                    group.create_task(lane(), name=f"remote worker {number}")
        except ExceptionGroup as refused:
            raise refused.exceptions[0] from None  # the lanes' are alike

    async def run_one(
        self, handler: Handler, *, queue: str = "default", kinds: Sequence[str] | None = None, lease_seconds: float = LEASE_SECONDS
    ) -> Ended | None:
        """Claim one task and bring it to its end; how it ended, or None when none was due."""
        task = await self.claim(queue=queue, kinds=kinds, lease_seconds=lease_seconds)
        return None if task is None else await self.attempt(task, handler)

    async def attempt(self, task: RemoteTask, handler: Handler) -> Ended:
        """Run the handler under the lease of `task`, and tell the server how it ended.

        When the caller is cancelled the handler is cancelled too, and the task given back; what has ended by then, or returns all
        the same, is still told.
        """
        working = asyncio.create_task(_run(handler, task), name=f"task {task.id}")
        keeping = asyncio.create_task(self._keep(task, working), name=f"heartbeat {task.id}")
        try:
            try:
                await asyncio.wait({working})
            except asyncio.CancelledError:
                if was_working := working.cancel():
                    await asyncio.wait({working})
                if was_working and (working.cancelled() or working.exception() is not None):
                    await self._in_time(self._give_back(task))
                else:  # it has ended in the same moment, or has done its work all the same
                    await self._in_time(self._finish(task, working))
                raise
            telling = asyncio.create_task(self._finish(task, working), name=f"end of task {task.id}")
            try:
                return await asyncio.shield(telling)
            except asyncio.CancelledError:
                await self._in_time(telling)
                raise
        finally:
            keeping.cancel()
            working.cancel()

    async def _in_time(self, telling: Awaitable[object]) -> None:
        """Limited: a cancellation goes on when this has been told, or could not be."""
        with contextlib.suppress(LeaseLost, ConfigError, ConnectionError, TimeoutError, ValueError):
            await asyncio.wait_for(telling, self._calls.timeout_seconds)

    async def _finish(self, task: RemoteTask, working: asyncio.Task[object]) -> Ended:
        """Tell how the handler ended. Its lease is kept meanwhile, and it is told again until there is an answer, or too much time
        has passed."""
        if task.lost is not None:
            _log.warning("task %d: stopped: %s", task.id, task.lost)
            return "lost"
        error = asyncio.CancelledError("cancelled itself") if working.cancelled() else working.exception()
        output = None if error is not None else working.result()
        failures = 0
        until = local_seconds() + max(task.lease_seconds * _TELL_LEASES, _TELL_AT_LEAST_SECONDS)
        while True:
            try:
                if error is None:
                    await self.complete(task, output)
                    return "completed"
                await self.fail(task, f"{type(error).__name__}: {describe(error)}")
                return "failed"
            except LeaseLost as refused:
                _log.warning("%s", refused)
                return "lost"
            except (TypeError, ValueError) as refused:
                if error is not None:
                    raise
                error = refused  # an output that cannot be stored is a failed attempt
            except ConnectionError as trouble:
                # Also past the trust: a late end counts until somebody has taken the task back.
                failures += 1
                _log.warning("task %d: not told yet: %s", task.id, trouble)
                if local_seconds() >= until:
                    return "lost"
                await asyncio.sleep(delay_seconds(failures))

    async def _keep(self, task: RemoteTask, working: asyncio.Task[object]) -> None:
        """Renew at a third of the lease; stop the handler when the lease is gone, or no longer trusted."""
        pause_seconds = renew_in_seconds(task)
        failures = 0
        while task.lost is None:
            await asyncio.sleep(max(min(pause_seconds, task.trusted_until - local_seconds()), 0))
            try:
                if local_seconds() >= task.trusted_until:
                    task.lost = "lease_untrusted"
                else:
                    async with asyncio.timeout(task.trusted_until - local_seconds()):  # also while its end is told
                        await self.heartbeat(task)
                    pause_seconds, failures = renew_in_seconds(task), 0
            except LeaseLost:
                pass  # task.lost says why
            except (ConnectionError, TimeoutError, ConfigError, ValueError) as error:
                # Whatever it was, nobody has said that the lease is gone, nor that it goes on: the trust decides.
                failures += 1
                pause_seconds = min(delay_seconds(failures), task.lease_seconds / 12)
                _log.warning("task %d: no heartbeat: %s", task.id, safe_text(error))
        working.cancel()


async def _run(handler: Handler, task: RemoteTask) -> object:
    try:
        output = await handler(task)
    except (SystemExit, KeyboardInterrupt) as error:  # that task's failure: it would end the loop and all others
        raise RuntimeError(f"the handler raised {type(error).__name__}: {describe(error)}") from error
    encode_json(output, "output")  # here, where a failure is the handler's own
    return output
