"""Makes batches ready in the background, while the devices compute: a thread reads, changes and places them.

An iterator of batches on the host goes in; an iterator of batches on the devices comes out, some steps ahead.
"""

from __future__ import annotations

import collections
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from splitjax.data.batches import is_whole
from splitjax.data.loaders import LoaderPosition
from splitjax.data.streams import Position
from splitjax.errors import DataError

CLOSE_SECONDS: float = 10.0


class Prefetch(Iterator[Any]):
    """Iterates over what `prefetch` makes ready; also a context manager that closes it.

    **Attributes:**

    - `wait_seconds`: how long its consumer has waited for batches so far, the first one included.
    """

    def __init__(self, source: Iterator[Any], place: Callable[[Any], Any], depth: int) -> None:
        self.wait_seconds: float = 0.0
        self._shared = _Shared(depth)
        # The thread holds what it shares with this object, not the object: dropped without close, it still ends the
        # thread.
        self._thread = threading.Thread(
            target=_work, args=(self._shared, source, place), name="splitjax-prefetch", daemon=True
        )
        weakref.finalize(self, self._shared.stop)
        self._thread.start()

    def __next__(self) -> Any:
        begin = time.perf_counter()
        try:
            return self._shared.take()
        finally:
            self.wait_seconds += time.perf_counter() - begin

    def close(self) -> None:
        """Ends the thread and closes the source; what was ready is dropped. Calling it again does nothing.

        A batch that is just being read or placed is finished first. Warns (`RuntimeWarning`) if that takes more than
        `CLOSE_SECONDS`, 10 s, and leaves the thread then, which does not keep the process alive.
        """
        self._shared.stop()
        if self._thread is threading.current_thread():
            return
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            warnings.warn(
                f"the thread {self._thread.name!r} did not end within {CLOSE_SECONDS:g} s", RuntimeWarning, stacklevel=2
            )

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def prefetch(iterator: Iterator[Any], place: Callable[[Any], Any], depth: int = 2) -> Prefetch:
    """Yields the items of `iterator`, placed by `place` in a background thread, up to `depth` of them ahead.

        with prefetch(stream(arrays, 256, seed=0), place) as batches:
            for position, batch in batches:
                state, metrics = step(state, batch)

    **Arguments:**

    - `iterator`: read by the thread alone, and closed by it if it can be (generators).
    - `place`: host -> devices, such as `lambda batch: jax.device_put(batch, sharding)`. It gets the item; of the pairs
      `(Position, batch)` of a `stream` and `(LoaderPosition, batch)` of `resumable` it gets the batch, and the position
      is kept beside what it returns. Of other tuples, such as those of `enumerate`, it gets all.
    - `depth`: at most this many placed items wait, the one in work included; with the one in use, `depth + 1` are
      alive.

    **Returns:** a `Prefetch`: an iterator with `close()` and `wait_seconds`. Use it in a `with`, so that no thread is
    left when the loop stops early or raises.

    An exception of `iterator` or `place` is raised to the consumer in its turn, behind the items that were ready, with
    the traceback of where it came from. Raises `DataError`, at once, for a depth below 1.
    """
    if not is_whole(depth) or depth < 1:
        raise DataError(
            "depth must be a whole number above 0",
            value=depth,
            place="prefetch, argument 'depth'",
            remedy="pass depth=2, or iterate plainly",
        )
    return Prefetch(iter(iterator), place, depth)


class _Shared:
    """Holds what the two threads share: a bounded queue, and how it ended."""

    def __init__(self, depth: int):
        self._depth = depth
        self._ready: collections.deque[Any] = collections.deque()
        self._changed = threading.Condition()
        self._stopped = self._finished = False
        self._error: BaseException | None = None

    def put(self, item: Any) -> None:
        with self._changed:
            self._ready.append(item)
            self._changed.notify_all()

    def wait_for_room(self) -> bool:
        """Waits, and returns False when there is nothing more to do."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or len(self._ready) < self._depth)
            return not self._stopped

    def finish(self, error: BaseException | None) -> None:
        with self._changed:
            self._finished, self._error = True, error
            self._changed.notify_all()

    def take(self) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._finished or self._stopped)
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def stop(self) -> None:
        with self._changed:
            self._stopped, self._error = True, None
            self._ready.clear()
            self._changed.notify_all()


def _work(shared: _Shared, source: Iterator[Any], place: Callable[[Any], Any]) -> None:
    error = None
    try:
        while shared.wait_for_room():
            try:
                item = next(source)
            except StopIteration:
                break
            shared.put(_placed(item, place))
            del item  # not kept alive until the next one is there
    except BaseException as caught:  # the consumer raises it
        error = caught
    finally:
        try:
            close = getattr(source, "close", None)
            if close is not None:
                close()
        except BaseException as caught:
            error = error or caught
        shared.finish(error)


def _placed(item: Any, place: Callable[[Any], Any]) -> Any:
    try:
        if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], (Position, LoaderPosition)):
            return item[0], place(item[1])
        return place(item)
    except StopIteration as error:  # raised to the consumer, it would pass for the end
        raise RuntimeError("place raised StopIteration") from error
