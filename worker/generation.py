"""What the generator is told: how often, and what. Checked by name before anything travels to the server."""

from __future__ import annotations

from dataclasses import dataclass

from worker.new_job import NewJob

LEAST_EVERY_SECONDS = 0.0001
MOST_EVERY_SECONDS = 30 * 86_400.0
MOST_RATE = 1 / LEAST_EVERY_SECONDS
MOST_PAUSE_SECONDS = 86_400.0
"""What the `sleep` handler accepts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is to change about the generator; None leaves it as it is (at first: a `sleep` of 1 to 10 s every second)."""

    every_seconds: float | None = None
    """The spacing of the slots."""
    min_seconds: float | None = None
    max_seconds: float | None = None
    """Bounds of the random pause: the jobs are of the kind `sleep` then."""
    job: NewJob | None = None
    """Kind and payload of every job, instead of pauses."""


NOTHING = Wish()


def wish(
    *,
    rate: float | None = None,
    every: float | None = None,
    min: float | None = None,
    max: float | None = None,
    job: NewJob | None = None,
) -> Wish:
    """A checked wish: `rate` jobs a second or one `every` so many seconds, pauses from `min` to `max` seconds or always `job`.

    Raises ValueError that begins with the name of what is wrong.
    """
    if rate is not None and every is not None:
        raise ValueError("rate, every: give one of them, not both")
    if job is not None and (min is not None or max is not None):
        raise ValueError("kind: min and max are for sleep jobs, give either them or a kind")
    _check("rate", rate, 1 / MOST_EVERY_SECONDS, MOST_RATE)
    _check("every", every, LEAST_EVERY_SECONDS, MOST_EVERY_SECONDS)
    _check("min", min, 0, MOST_PAUSE_SECONDS)
    _check("max", max, 0, MOST_PAUSE_SECONDS)
    if min is not None and max is not None and min > max:
        raise ValueError(f"min: {min:g} is more than max, {max:g}")
    return Wish(every_seconds=1 / rate if rate is not None else every, min_seconds=min, max_seconds=max, job=job)


def rate_of(every_seconds: float) -> float:
    """Jobs a second, as somebody would have written it."""
    return float(f"{1 / every_seconds:.12g}")


def _check(name: str, value: float | None, least: float, most: float) -> None:
    # NaN is within no bounds.
    if value is not None and not least <= value <= most:
        raise ValueError(f"{name}: from {least:g} to {most:g} is allowed, not {value:g}")
