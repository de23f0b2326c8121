"""The programs that a session has sent: which still run, which have failed, and what may be forgotten with the next.

An error is raised once, the first one: those of programs that were recorded before it was raised come of it, and are
not raised as well. Their arrays are lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from pscluster.core.errors import TensorLostError
from pscluster.spmd.execution.recording import Loaded, Ref, Running, described
from pscluster.worker.programs.program import ArrayType

HELD_BYTES = 64 << 20
"""Of arrays that nothing refers to, kept because the program that was sent last reads them."""


class ResultsLostError(TensorLostError):
    """A program's results are lost, and nothing else. It is raised where they are used, if they are."""


_Inputs = Mapping[int, tuple[str, ArrayType]]
"""What makes each array that a program reads, and its type, by its number."""


class _Sent(NamedTuple):
    """A program that has not ended, as far as is known here."""

    number: int
    running: Running
    inputs: _Inputs
    loaded: Sequence[Loaded]
    forgotten: Sequence[int]  # arrays that workers forget when it begins


class SentPrograms:
    """The programs of one session, by number, in the order of sending. Not thread-safe: the session has a lock."""

    def __init__(self, dropped: deque[int]) -> None:
        """Begin without any. `dropped`: the numbers of arrays to be forgotten, which other threads add to."""
        self._dropped = dropped
        self._running: deque[_Sent] = deque()
        self._unraised: BaseException | None = None
        self._excused = 0  # up to this program, errors are known, or come of one that is
        self._failed: dict[int, str] = {}
        """Why, by program: not as an error, which would keep the frames that it went through, and all their arrays."""

    @property
    def running(self) -> list[Running]:
        """Those that have not ended when `reap` was called last."""
        return [sent.running for sent in self._running]

    @property
    def any_running(self) -> bool:
        """Whether there are such."""
        return bool(self._running)

    @property
    def any_failed(self) -> bool:
        """Whether a program has failed, ever."""
        return bool(self._failed)

    @property
    def has_unraised(self) -> bool:
        """Whether there is an error for `take_error`."""
        return self._unraised is not None

    def why_failed(self, number: int) -> str | None:
        """Return why a program has failed; None if it has not, as far as is known."""
        return self._failed.get(number)

    def add(
        self, number: int, running: Running, inputs: Sequence[Ref], loaded: Sequence[Loaded], forgotten: Sequence[int]
    ) -> None:
        """Add a program that was sent with blocks of arrays (`loaded`), and with numbers that workers forget."""
        # Not the arrays themselves: they may be dropped before it has ended.
        of_inputs = {ref.number: (ref.made_by, ref.type) for ref in inputs}
        self._running.append(_Sent(number, running, of_inputs, loaded, forgotten))

    def fail(self, number: int, error: BaseException, loaded: Sequence[Loaded], forgotten: Sequence[int] = ()) -> None:
        """Record that a program has failed: what it makes is lost; the rest goes with another program, again."""
        self._failed[number] = f"{type(error).__name__}: {error!s:.300}"
        self._dropped.extend(forgotten)
        for of, blocks in loaded:
            if (ref := of()) is not None:
                ref.blocks, ref.program = blocks, 0

    def reap(self) -> None:
        """Record what came of programs that have ended."""
        while self._running and self._running[0].running.wait(0):
            sent = self._running.popleft()
            try:
                sent.running.result()
            except BaseException as raised:
                error = _named(raised, sent.inputs)
                self.fail(sent.number, error, sent.loaded, sent.forgotten)  # it may never have begun
                # Those that follow were cancelled, or lack what this one would have made.
                is_first = self._unraised is None and sent.number > self._excused
                if is_first and not isinstance(error, ResultsLostError):
                    self._unraised = error

    def take_error(self, number: int, loaded: Sequence[Loaded]) -> BaseException | None:
        """Return the first error that was not raised, for it to be raised; None if there is none.

        With it fails what is recorded: program `number`, which is not sent.
        """
        if (error := self._unraised) is not None:
            self._unraised, self._excused = None, number
            self.fail(number, error, loaded)
        return error

    def forgettable(self, inputs: Collection[int], *, alone: bool) -> tuple[set[int], bool]:
        """Return the arrays that a program with these inputs may forget, and whether it must wait for the one before.

        `alone`: there is one worker, which can't lag behind another.
        """
        dropped, waits = {self._dropped.popleft() for _ in range(len(self._dropped))}, False
        keep = dropped.intersection(inputs)
        if self._running and not alone:
            read = self._running[-1].inputs
            held = (dropped - keep).intersection(read)
            waits = sum(read[number][1].nbytes for number in held) > HELD_BYTES
            if not waits:
                keep |= held
        self._dropped.extend(keep)
        return dropped - keep, waits


def _named(error: BaseException, inputs: _Inputs) -> BaseException:
    """Return the error of a program, which says what array is lost, if it is that."""
    if not isinstance(error, TensorLostError) or error.number is None or error.number not in inputs:
        return error
    return TensorLostError(
        f"{described(*inputs[error.number])}, is lost: a worker of its mesh was restarted, or the program that makes "
        "it has failed. Make it again, from host arrays or variables, which are not lost"
    )
