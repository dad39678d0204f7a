"""A host whose wall clock is wrong, or jumps: no lease is judged by it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from datetime import datetime

import pytest

from tests.workplace import Workplace

OTHER_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long ahead(void) {
    char text[32] = "";
    int file = open(getenv("SECONDS_AHEAD"), O_RDONLY);
    if (file >= 0 && read(file, text, sizeof text - 1) < 0) text[0] = 0;
    if (file >= 0) close(file);
    return atol(text);
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int answer = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += ahead();
    return answer;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    int answer = clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return answer;
}
time_t time(time_t *here) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (here) *here = precise.tv_sec;
    return precise.tv_sec;
}
"""


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="a clock of one's own needs Linux and a C compiler"
)
@pytest.mark.parametrize("seconds", [600, -600])
def test_a_wall_clock_that_is_wrong_or_jumps_changes_nothing(workplace: Workplace, seconds: int) -> None:
    """C12: wrong from the start, and again in the middle of a job; another process stands by for whatever would expire."""
    source, library, ahead = (workplace.directory / name for name in ("clock.c", "clock.so", "ahead"))
    source.write_text(OTHER_CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, timeout=60)
    ahead.write_text(str(seconds))
    daemon = workplace.daemon(LD_PRELOAD=str(library), SECONDS_AHEAD=str(ahead), WORKER_LEASE_SECONDS="6")

    def seconds_ahead(event: dict[str, str]) -> float:
        now: datetime = workplace.value("SELECT now()")
        return (datetime.fromisoformat(event["timestamp"]) - now).total_seconds()

    assert seconds_ahead(daemon.find("daemon_ready")[0]) == pytest.approx(seconds, abs=120), "else its clock is ours"
    long = workplace.add("nap", {"seconds": 8})
    workplace.wait_for_notes("start")
    other = workplace.daemon(WORKER_QUEUES="another")
    later = workplace.value("SELECT id FROM enqueue_job('nap', '{}', run_at => now() + interval '3 seconds')")
    ahead.write_text(str(-seconds))
    assert workplace.wait_for_state(later, "succeeded").attempts == 1
    assert workplace.value("SELECT started_at >= available_at FROM jobs WHERE id = %s", later)
    assert workplace.wait_for_state(long, "succeeded").attempts == 1
    assert seconds_ahead(daemon.wait_for_event("job_succeeded", job_id=long)) == pytest.approx(-seconds, abs=120)
    assert daemon.find("job_abandoned") == other.find("lease_expired") == []
    workplace.healthy()
