"""The arrays that optimizers keep beside variables, as handles."""

from __future__ import annotations

import json

from pscluster.ps.handles.variables.variable import Variable
from pscluster.ps.optim.precision import compute_dtype


class SlotVariable(Variable):
    """An array that an optimizer keeps beside a variable; it can be read like one."""

    handle_kind = "slot"
    takes_whole_reads = False

    @staticmethod
    def beside(variable: Variable, optimizer: int, optimizer_name: str, slot: str) -> SlotVariable:
        """Return the slot of that name, with the variable's shape and shards."""
        handle: SlotVariable = object.__new__(SlotVariable)
        handle.__dict__.update(variable.__dict__)
        handle.name = f"{variable.name}/{optimizer_name}/{slot}"
        handle.dtype = compute_dtype(variable.dtype)
        handle.trainable = False
        handle.wire_dtype = handle.push_top_k = 0
        handle._slot = (optimizer, slot)
        handle.variable, handle.optimizer_name = variable, optimizer_name
        handle._key = json.dumps([variable.handle_key, optimizer_name, slot])
        return handle

    variable: Variable
    optimizer_name: str
    _key: str

    @property
    def handle_key(self) -> str:
        return self._key

    def key_with(self, prefix: str) -> str:
        _, optimizer_name, slot = json.loads(self._key)
        return json.dumps([self.variable.key_with(prefix), optimizer_name, slot])
