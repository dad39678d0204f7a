"""Waiting in tests: for a fact, through a time in which a fact must stay true, or for a cancellation."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from random import Random
from typing import NoReturn, TypeVar

LOOK_AGAIN_SECONDS = 0.02

T = TypeVar("T")


def wait_for(fact: Callable[[], T], timeout_seconds: float = 30) -> T:
    """The first true answer of `fact`, in which an AssertionError means: not yet. Fails after the time.

    What must hold all the while is noted in `fact` and asserted afterwards.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        answer, doubt = _ask(fact)
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise _never(fact, timeout_seconds, answer) from doubt
        time.sleep(LOOK_AGAIN_SECONDS)


async def await_for(fact: Callable[[], T | Awaitable[T]], timeout_seconds: float = 30) -> T:
    """The same inside a running loop, which goes on meanwhile; `fact` may be a coroutine function."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        answer, doubt = _ask(fact)
        if inspect.isawaitable(answer):
            try:
                answer = await answer
            except AssertionError as error:
                answer, doubt = None, error
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise _never(fact, timeout_seconds, answer) from doubt
        await asyncio.sleep(LOOK_AGAIN_SECONDS)


def wait_while(fact: Callable[[], object], seconds: float) -> None:
    """For what must *not* happen: `fact` is true now, and at every look until the time is over."""
    end = time.monotonic() + seconds
    while True:
        _still(fact, fact())
        if time.monotonic() > end:
            return
        time.sleep(LOOK_AGAIN_SECONDS)


async def await_while(fact: Callable[[], object | Awaitable[object]], seconds: float) -> None:
    """The same inside a running loop, which goes on meanwhile; `fact` may be a coroutine function."""
    end = time.monotonic() + seconds
    while True:
        answer = fact()
        _still(fact, await answer if inspect.isawaitable(answer) else answer)
        if time.monotonic() > end:
            return
        await asyncio.sleep(LOOK_AGAIN_SECONDS)


async def until_cancelled(limit_seconds: float = 60) -> NoReturn:
    """What stands here ends by being cancelled; that nobody does so is a failure of its own."""
    await asyncio.sleep(limit_seconds)
    raise AssertionError(f"nobody cancelled this within {limit_seconds:g} s")


def block_loop(seconds: float) -> None:
    """Hold the thread, and with it the loop that runs in it: nothing is heard, renewed or cancelled meanwhile."""
    time.sleep(seconds)


def any_moment(choices: Random, at_most_seconds: float) -> None:
    """Let a random time pass: what follows hits the other side anywhere in what it does."""
    time.sleep(choices.uniform(0, at_most_seconds))


def _ask(fact: Callable[[], T]) -> tuple[T | None, AssertionError | None]:
    try:
        return fact(), None
    except AssertionError as error:
        return None, error


def _still(fact: Callable[..., object], answer: object) -> None:
    assert answer, f"{_name(fact)} did not stay true; last answer: {answer!r}"


def _never(fact: Callable[..., object], timeout_seconds: float, answer: object) -> AssertionError:
    return AssertionError(f"{_name(fact)} was not true within {timeout_seconds:g} s; last answer: {answer!r}")


def _name(fact: Callable[..., object]) -> str:
    return getattr(fact, "__qualname__", repr(fact))
