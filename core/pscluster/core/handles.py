"""Handles: objects that name something living on the cluster, such as a variable, and travel by that name.

A handle is legal as an argument, as a result and as a captured value of a scheduled function. It is never
pickled: what it names stays where it is, and the receiver makes its own handle from kind and key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self


class Handle:
    """Base of all handles.

    Subclasses set `handle_kind` ("variable", "optimizer", ...) and `handle_key`, what names the thing among
    those of its kind. Neither may change in the life of the object. Copies, deep ones too, are the handle
    itself.

    Not an `ABC`: every object that is encoded or pickled is asked whether it is a handle, and `isinstance`
    of an abstract class costs several times that of a plain one.
    """

    __slots__ = ()

    if TYPE_CHECKING:  # at run time a property would keep subclasses from setting a plain attribute

        @property
        def handle_kind(self) -> str: ...

        @property
        def handle_key(self) -> str: ...

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        """Refuse ordinary pickling.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"{self.handle_kind} {self.handle_key!r} lives on the cluster and can't be pickled: "
            f"pass it as an argument of a scheduled function, or capture it in one"
        )


class StaysHere:
    """Base of what stays in the script: no function can have it, neither as an argument nor captured.

    Subclasses set `instead`, what to do, for the message of whoever tries.
    """

    __slots__ = ()
    instead: ClassVar[str]

    @property
    def why(self) -> str:
        """For messages: "X is a Y, which ..."."""
        return f"stays in the script: {self.instead}"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse pickling. TypeError always."""
        raise TypeError(f"a {type(self).__name__} {self.why}")
