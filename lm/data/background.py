"""A thread that runs an iterator some items ahead of whoever takes them.

Beside the batch's way: `data/stream` makes its batches in one, so that they are ready when a training step asks.
"""

import queue
import threading
import weakref
from collections.abc import Iterator


class Background:
    """Runs an iterator in a thread, some items ahead; its exceptions are raised where the items are taken.

    The thread ends when the iterator does, when `close` is called, when nobody holds this object any more, or when
    the interpreter exits.

    Args:
        items: a generator.
        depth: how many items may be ready.
    """

    def __init__(self, items: Iterator, depth: int):
        self._ready: queue.Queue = queue.Queue(depth)
        stop = threading.Event()
        thread = threading.Thread(
            target=_pump, args=(items, self._ready, stop), name="lm-stream", daemon=True
        )  # `_pump` is given no reference to this object, or it could never be collected
        self._end: BaseException | None = None
        self.close = weakref.finalize(self, _halt, self._ready, stop, thread)
        thread.start()

    def __iter__(self) -> "Background":
        return self

    def __next__(self):
        if self._end is None and self.close.alive:
            item, self._end = self._ready.get()
            if self._end is None:
                return item
            self.close()
        raise self._end or StopIteration


def _pump(items: Iterator, ready: queue.Queue, stop: threading.Event) -> None:
    end: BaseException = StopIteration()
    try:
        for item in items:
            ready.put((item, None))
            if stop.is_set():
                return
    except BaseException as error:
        end = error
    finally:
        items.close()
    ready.put((None, end))


def _halt(ready: queue.Queue, stop: threading.Event, thread: threading.Thread) -> None:
    """Tell the thread to stop, make room for the item that it may be putting, and wait for its last read."""
    stop.set()
    while thread.is_alive():
        try:
            ready.get_nowait()
        except queue.Empty:
            thread.join(0.02)
