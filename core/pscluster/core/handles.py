"""Handles: objects that name something on the cluster, such as a variable, and travel by that name.

A handle may be an argument, a result or a captured value of a scheduled function. It is never pickled: what it names
stays where it is, and the receiver makes its own handle from kind and key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self


class Handle:
    """Base of all handles.

    Subclasses set `handle_kind` ("variable", "optimizer", ...) and `handle_key`, the name among those of its kind.
    Neither may change during the object's lifetime. A copy, even a deep one, is the handle itself.
    A handle that is `ephemeral` names something of one evaluation.

    Not an `ABC`: every object that is encoded or pickled is checked for being a handle, and `isinstance` costs several
    times as much with an abstract class.
    """

    __slots__ = ()
    ephemeral = False

    if TYPE_CHECKING:  # at run time a property would keep subclasses from setting a plain attribute

        @property
        def handle_kind(self) -> str: ...

        @property
        def handle_key(self) -> str: ...

    def as_sent(self) -> Handle:
        """Return the handle that is sent for this one: another one if what this one names may change later."""
        return self

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self.handle_kind} {self.handle_key!r} lives on the cluster and can't be pickled: "
            f"pass it as an argument of a scheduled function, or capture it in one"
        )


class StaysHere:
    """Base of what stays in the script: no function can have it, neither as an argument nor captured.

    Subclasses set `instead`, which tells the user what to do.
    """

    __slots__ = ()
    instead: ClassVar[str]

    @property
    def why(self) -> str:
        """The reason, for messages such as "X is a Y, which ..."."""
        return f"stays in the script: {self.instead}"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} {self.why}")
