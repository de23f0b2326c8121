"""An extension of Griffe for `make docs`: classes that have no `__init__` are shown with the arguments of `__new__`."""

from __future__ import annotations

from typing import Any

import griffe


class New(griffe.Extension):
    """Shows `__new__` as what makes an object."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Take `__new__` for `__init__`, where a class has only that."""
        del kwargs
        new = cls.members.get("__new__")
        if isinstance(new, griffe.Function) and "__init__" not in cls.members:
            init = griffe.Function("__init__", parameters=new.parameters, lineno=new.lineno, endlineno=new.endlineno)
            cls.set_member("__init__", init)
