"""Prefetches batches to the device before they are requested.

A thread takes batches from the loader and puts them into staging memory. A request for a batch also
starts the copies of the next ones, on a separate stream: they run during the step. Their device
memory belongs to the computing stream; it is allocated between two steps and freed like that of any
other tensor, so it is the same in every run and can be predicted.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from oomph.data.staging import Slot
from oomph.data.waiting import make_waiting
from oomph.errors import BadInput
from oomph.jobs.job import check_count
from oomph.memory.cuda_link import CudaLink
from oomph.memory.link import Copy, Link

#: Besides the batches on the device, one is being staged and one is ready to be sent.
STAGED = 2


class Prefetcher:
    """A loader whose batches are on the device, up to `depth` of them ahead of the step.

    On the CPU, a thread only fetches them ahead. Other attributes of the loader are available, too:
    its length, its sampler, its position. A loader that draws random numbers in this process,
    rather than in workers or from its own generator, draws them at other times than without
    prefetching.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: str | torch.device,
        depth: int = 2,
        *,
        link: Link | None = None,
    ) -> None:
        self.depth = check_count("the depth of prefetching", depth)
        self.device = torch.device(device)
        self._loader: Any = loader
        if link is None and self.device.type == "cuda":
            link = CudaLink(self.device)
        self._link = link
        self._slots = [Slot(link) if link is not None else None for _ in range(depth + STAGED)]
        self._waiting = make_waiting(self.device)
        self._pass: weakref.ref[_Pass] | None = None
        self._feed: _Feed | None = None
        #: The loader's position after the last batch that was handed out.
        self._place: Any = None
        self._closed = False

    @property
    def waited(self) -> tuple[float, ...]:
        """Seconds that the device waited for each batch so far: on a GPU, its idle time."""
        return self._waiting.seconds()

    @property
    def host_bytes(self) -> int:
        """Staging memory, pinned if there is a GPU."""
        return sum(slot.nbytes for slot in self._slots if slot is not None)

    def __iter__(self) -> Iterator[Any]:
        """Open the loader in the calling thread, and start fetching."""
        if self._closed:
            raise BadInput("this prefetcher is closed; make another one for the same loader")
        self._end_pass()
        self._place = self._place_of_loader()
        feed = _Feed(iter(self._loader), self._slots, self._place_of_loader, self.device)
        one = _Pass(self, feed)
        self._pass, self._feed = weakref.ref(one), feed
        return one

    def __len__(self) -> int:
        return len(self._loader)

    def close(self) -> None:
        """End the thread, wait for copies and free the memory."""
        self._end_pass()
        self._closed = True
        if self._link is not None:
            self._link.close()
        self._slots = []

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        # Only for missing attributes. The reported position is the step's, not the thread's.
        if name.startswith("_"):
            raise AttributeError(name)
        value = getattr(self._loader, name)
        own = {"state_dict": self._state_dict, "load_state_dict": self._load_state_dict}
        return own.get(name, value)

    def _state_dict(self) -> Any:
        return self._place if self._place is not None else self._place_of_loader()

    def _load_state_dict(self, state_dict: Any) -> None:
        self._end_pass()
        self._loader.load_state_dict(state_dict)
        self._place = None

    def _place_of_loader(self) -> Any:
        return self._loader.state_dict() if hasattr(self._loader, "state_dict") else None

    def _end_pass(self) -> None:
        one = self._pass() if self._pass is not None else None
        if one is not None:
            one.end()
        if self._feed is not None:
            self._feed.join()  # the thread of a forgotten pass may still fetch
        self._pass = self._feed = None


class _Pass(Iterator[Any]):
    """One pass over the loader; its thread ends with the last batch, or soon after the pass."""

    def __init__(self, prefetcher: Prefetcher, feed: _Feed) -> None:
        self._prefetcher, self._feed = prefetcher, feed
        #: Batches on their way to the device, the next one first.
        self._sent: deque[_Sent] = deque()
        # The thread references the feed and not this pass, so this pass can be collected.
        self.end = weakref.finalize(self, _end_pass, feed, self._sent)
        feed.start()

    def __next__(self) -> Any:
        waiting = self._prefetcher._waiting
        waiting.begin()
        if not self._sent:
            self._send(self._feed.take())
        now = self._sent.popleft()
        self._send_ahead()
        if now.place is not None:
            self._prefetcher._place = now.place
        if now.error is not None:
            self.end()
            self._feed.join()
            raise now.error
        for copy in now.copies:
            copy.wait()
        waiting.end()
        return now.batch

    def _send_ahead(self) -> None:
        while len(self._sent) < self._prefetcher.depth and (ready := self._feed.take_ready()):
            try:
                self._send(ready)
            except torch.OutOfMemoryError:
                return  # no room ahead of the step: it is sent when it is requested

    def _send(self, fetched: _Fetched) -> None:
        batch, copies = fetched.batch, list[Copy]()
        if fetched.slot is not None:
            try:
                batch, copies = fetched.slot.send(batch, self._prefetcher.device)
            except BaseException:
                self._feed.put_back(fetched)  # the next request gets this batch
                raise
        if fetched.error is None:
            self._feed.give_back(fetched)
        sent = _Sent(batch=batch, copies=copies, place=fetched.place, error=fetched.error)
        self._sent.append(sent)


def _end_pass(feed: _Feed, sent: deque[_Sent]) -> None:
    """End the thread; frees nothing that a copy still writes to.

    It waits for the GPU at most: a garbage collector may call it anywhere, even inside `threading`
    while it holds locks that an ending thread needs.
    """
    feed.close()
    for one in sent:
        for copy in one.copies:
            copy.finish()
    sent.clear()


@dataclass(frozen=True, kw_only=True)
class _Fetched:
    """A batch in its slot; or, at the end, the error raised instead of one."""

    batch: Any = None
    slot: Slot | None = None
    place: Any = None
    error: BaseException | None = None


@dataclass(frozen=True, kw_only=True)
class _Sent:
    """A batch on the device, or on its way there."""

    batch: Any
    copies: list[Copy]
    place: Any
    error: BaseException | None


class _Feed:
    """The batches that the thread has fetched; it waits while all slots are full."""

    def __init__(
        self,
        batches: Iterator[Any],
        slots: list[Slot | None],
        place: Callable[[], Any],
        device: torch.device,
    ) -> None:
        self._batches, self._place, self._device = batches, place, device
        self._free = deque(slots)
        self._ready: deque[_Fetched] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="oomph-prefetch", daemon=True)

    def start(self) -> None:
        """Start fetching."""
        _running.add(self)
        self._thread.start()

    def take(self) -> _Fetched:
        """The next batch, once it is there."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._closed)
            # After its end a pass keeps raising StopIteration, as iterators do.
            return self._ready.popleft() if self._ready else _Fetched(error=StopIteration())

    def take_ready(self) -> _Fetched | None:
        """The next batch if it is there."""
        with self._changed:
            return self._ready.popleft() if self._ready else None

    def put_back(self, fetched: _Fetched) -> None:
        """Return a batch that could not be sent: it is the next one again."""
        with self._changed:
            self._ready.appendleft(fetched)

    def give_back(self, fetched: _Fetched) -> None:
        """Release a batch's slot, to be filled again once its copies are done."""
        with self._changed:
            self._free.append(fetched.slot)
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread after the batch that it is fetching."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closed:
                fetched = self._fetch()
                with self._changed:
                    if self._closed:
                        return
                    self._ready.append(fetched)
                    self._changed.notify_all()
                    if fetched.error is not None:
                        return
                    self._changed.wait_for(lambda: self._free or self._closed)
        finally:
            self._end_batches()

    def _fetch(self) -> _Fetched:
        """The next batch; or the exception, even StopIteration, to raise when it is requested."""
        try:
            batch = next(self._batches)
            slot = self._free.popleft()
            staged = batch
            if slot is not None:
                with self._on_device():  # pinning creates a context if there is none
                    staged = slot.stage(batch)
            return _Fetched(batch=staged, slot=slot, place=self._place())
        except StopIteration as end:
            return _Fetched(place=self._place(), error=end)
        except BaseException as error:
            return _Fetched(error=error)  # the position stays before the batch that failed

    def _on_device(self) -> AbstractContextManager[Any]:
        if self._device.type == "cuda":
            return torch.cuda.device(self._device)
        return contextlib.nullcontext()

    def _end_batches(self) -> None:
        """Close generators and workers together with their thread."""
        close = getattr(self._batches, "close", None)
        if close is not None:
            with contextlib.suppress(Exception):
                close()
        del self._batches


#: Feeds whose threads may be running: a thread references its feed.
_running: weakref.WeakSet[_Feed] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Stop all threads before the interpreter exits."""
    for feed in list(_running):
        feed.close()
        feed.join()
