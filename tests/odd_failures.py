"""Exceptions that are hard to record: without a text, in a circle, without a bound, or not meant to be caught."""

from __future__ import annotations

import asyncio
import builtins
import sys
from typing import NoReturn


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Demanding(Exception):
    def __init__(self, one: int, *, two: int) -> None:
        super().__init__()


class Slippery(Exception):
    """Whatever is asked of it beyond its text raises."""

    @property
    def detail(self) -> str:
        raise RuntimeError("no detail")

    sqlstate = exceptions = add_note = diag = detail


def raise_oddly(how: str) -> NoReturn:
    """Each way has a name."""
    match how:
        case "slippery":
            raise Slippery("with text")
        case "slippery cause":
            try:
                raise Slippery
            except Slippery as error:
                raise ValueError("caused") from error
        case "circle":
            one, other = ValueError("one"), KeyError("other")
            one.__cause__, other.__cause__ = other, one
            raise one
        case "long name":
            raise type("E" * 100_000, (Exception,), {})
        case "base group":
            raise BaseExceptionGroup("several", [KeyboardInterrupt(), SystemExit(4), asyncio.CancelledError()])
        case "bottomless":
            raise_oddly(how)
        case "StopIteration" | "StopAsyncIteration" | "GeneratorExit" | "MemoryError" | "TimeoutError" | "InterruptedError" as name:
            raise getattr(builtins, name)
        case "unprintable":
            raise Unprintable
        case "group":
            raise ExceptionGroup("several", [ValueError("one"), Unprintable()])
        case "demanding":
            raise Demanding(1, two=2)
        case "SystemExit":
            sys.exit(3)
        case "KeyboardInterrupt":
            raise KeyboardInterrupt
        case "CancelledError":
            raise asyncio.CancelledError
        case "surrogate":
            raise ValueError("\ud800 and \x00")
        case _:
            raise AssertionError(f"no such way: {how}")
