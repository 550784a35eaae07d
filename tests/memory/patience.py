"""What happens soon, in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def eventually(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether it comes to hold before that time is over."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def waits_for_nobody(act: Callable[[], None], seconds: float = 20.0) -> bool:
    """Whether it comes to its end by itself."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
