"""A library that says things in every way there is."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

NOISE = """
import asyncio, logging, sys, threading, warnings

class Odd:
    def __repr__(self):
        raise RuntimeError("no words")

    def __del__(self):
        raise RuntimeError("said in __del__")

def speak(log):
    print("said by print", end="")
    print("\\nsaid in\\nlines", "\\x1b[31m", "\\ud800", file=sys.stderr)
    print("x" * 1_000_000)
    sys.stdout.buffer.write(b"said in bytes \\xff\\n")
    warnings.warn("said by a warning\\nin lines")
    try:
        1 / 0
    except ZeroDivisionError:
        logging.exception("said by logging %s", "\\ud800")
    logging.error("%d said with arguments that do not fit", "one")
    logging.getLogger("a.library").critical({"said": Odd()})
    log.info("said by job.log", odd=Odd(), number=float("nan"), text="\\ud800\\x00", nested={1: {2, 3}}, large=10**5000)
    thread = threading.Thread(target=lambda: [][1], name="said by a thread")
    thread.start()
    thread.join()
    over = asyncio.Event()
    asyncio.get_running_loop().create_task(fail(over))
    return over

async def fail(over):
    over.set()
    raise ValueError("said by a task that nobody awaits")
"""


async def make_noise(log: Any) -> None:
    namespace: dict[str, Any] = {}
    exec(NOISE, namespace)  # a library, which we did not write
    task_has_failed: asyncio.Event = namespace["speak"](log)
    await task_has_failed.wait()
    gc.collect()
