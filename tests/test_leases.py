from __future__ import annotations
from tests.workplace import Workplace

def test_smoke(workplace: Workplace) -> None:
    import time
    a=time.monotonic()
    d = workplace.daemon()
    b=time.monotonic()
    i = workplace.add("nap")
    workplace.wait_for_state(i, "succeeded")
    c=time.monotonic()
    assert d.stop() == 0
    e=time.monotonic()
    print(b-a,c-b,e-c)
    print(d.stdout_path.read_text(), d.stderr)
    assert 0
