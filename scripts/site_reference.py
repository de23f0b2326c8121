"""An extension of Griffe, which reads the sources for the reference of `make docs`."""

from __future__ import annotations

from typing import Any

import griffe

_INTERNAL = "for internal use"
"""What the docstring of a name says that is public only to other packages of ours."""


class Reference(griffe.Extension):
    """Shows `__new__` as what makes an object, and leaves out what is for internal use."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Take `__new__` for `__init__`, where a class has only that; remove what its docstring calls internal."""
        del kwargs
        for name, member in list(cls.members.items()):
            if not member.is_alias and member.docstring and _INTERNAL in member.docstring.value.lower():
                cls.del_member(name)
        new = cls.members.get("__new__")
        if isinstance(new, griffe.Function) and "__init__" not in cls.members:
            init = griffe.Function("__init__", parameters=new.parameters, lineno=new.lineno, endlineno=new.endlineno)
            cls.set_member("__init__", init)
