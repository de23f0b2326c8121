"""Decide whether a thread does something itself, or has another thread do it meanwhile. Pure.

To hand work over costs two threads their turns in the interpreter, and the processor's caches: more than the work, if
that is only to send some hundred KiB. But what takes long, because of the user's code or of a slow network, is done
beside the step. How long the next piece will take is not known; the last ones say.

    HERE      --a piece was quick--> HERE
              --it was not---------> ELSEWHERE  for one piece; for twice as many if the last one here was slow, too
    ELSEWHERE --they are done------> HERE
"""

from __future__ import annotations

OWN_BYTES = 1 << 20
"""Of a push that a step's own thread sends, or a reply that lies in the kernel until it is needed: more has no room."""

QUICK_SECONDS = 0.003

MOST_ELSEWHERE = 1024
"""Pieces until it is tried here again."""


class OwnThread:
    """What one thread decides by for pieces of one kind."""

    def __init__(self) -> None:
        self._elsewhere = 0  # pieces left to another thread
        self._next = 1

    def takes(self) -> bool:
        """Return whether to do the next piece here. Called once for each."""
        if self._elsewhere:
            self._elsewhere -= 1
            return False
        return True

    def took(self, seconds: float) -> None:
        """Note how long a piece has taken here; infinity if it was left to another thread after all."""
        if seconds <= QUICK_SECONDS:
            self._next = 1
        else:
            self._elsewhere = self._next
            self._next = min(2 * self._next, MOST_ELSEWHERE)
