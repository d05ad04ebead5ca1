"""How a process ends though a thread of it is in a call that does not return.

A read from an object store that does not answer cannot be interrupted, and pyarrow waits for all of them when the
interpreter goes. Importing this imports neither.
"""

import atexit
import os
import sys
import threading
import time
from contextlib import suppress

GRACE = 2.0  # seconds that such calls have at the end
_calls: set[threading.Thread] = set()


def may_hang(thread: threading.Thread) -> None:
    """Note a thread that is about to make such a call, and is no other thread's to wait for."""
    _calls.difference_update([call for call in list(_calls) if call.ident is not None and not call.is_alive()])
    _calls.add(thread)


def leave(code: int) -> None:
    """Exit with this code, without what is still in a call after a moment."""
    end = time.monotonic() + GRACE
    for thread in list(_calls):
        if thread.ident is not None:
            thread.join(max(0.0, end - time.monotonic()))
    if not any(thread.is_alive() for thread in list(_calls)):
        sys.exit(code)
    waits = getattr(sys.modules.get("pyarrow.fs"), "ensure_s3_finalized", None)  # not in every build of pyarrow
    if waits is not None:
        atexit.unregister(waits)
    atexit._run_exitfuncs()
    with suppress(OSError):  # nobody may be reading any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
