"""A process does not end under a thread of obstore's that is still inside Python."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading

import pytest
from tiercheck_obstore.exit import let_foreign_threads_out

CALLBACK = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)

ENDING = """
import ctypes, time
import tiercheck_obstore.driver

@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
def callback(_):
    inside.set()
    time.sleep(0.1)  # needs the GIL again when the program has long come to its end
    print("out", flush=True)

import threading
inside = threading.Event()
thread = ctypes.c_ulong()
assert ctypes.CDLL(None).pthread_create(ctypes.byref(thread), None, callback, None) == 0
inside.wait()
"""


@pytest.mark.parametrize("known", [False, True])
def test_a_foreign_thread_is_waited_for_until_the_deadline(known: bool) -> None:
    """Also one that ``threading`` has heard of: whatever it logs asks for its name."""
    inside, go = threading.Event(), threading.Event()

    @CALLBACK
    def callback(_: object) -> None:
        if known:
            threading.current_thread()
        inside.set()
        go.wait()

    assert let_foreign_threads_out()
    thread = ctypes.c_ulong()
    assert ctypes.CDLL(None).pthread_create(ctypes.byref(thread), None, callback, None) == 0
    assert inside.wait(10)
    try:
        assert not let_foreign_threads_out(deadline_s=0.05)
    finally:
        go.set()
    assert let_foreign_threads_out(deadline_s=10)


def test_threads_of_python_s_own_are_not() -> None:
    go = threading.Event()
    thread = threading.Thread(target=go.wait, daemon=True)
    thread.start()
    assert let_foreign_threads_out(deadline_s=10)
    go.set()
    thread.join()


def test_a_process_that_used_the_driver_lets_them_out() -> None:
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "out\n", "")
