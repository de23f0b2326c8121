"""Variables and optimizers that a checkpoint has, and the script makes only after it has restored it.

    restored -> a variable of its names is made    -> its values are restored, and the slots of optimizers that exist
             -> an optimizer of its names is made  -> the variables that were made since are restored again, with slots

So it does not matter in which order a script restores, makes its model and its optimizers. Once something may have
changed these variables, an optimizer that is made begins with new slots: values must not be taken back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from pscluster.coordinator.checkpoints.index import Index, SavedVariable
from pscluster.ps.handles.variables.variable import Variable

logger = logging.getLogger(__name__)

Restore = Callable[[Sequence[Variable]], None]


class DeferredRestore:
    """What is left of a checkpoint that was restored: the variables in it that there are not yet.

    Args:
        index: the checkpoint's.
        path: where it is.
        names: of the variables that are awaited.
        restore: restores these variables alone.
        may_have_changed: returns whether something may have changed one of these variables since it was restored.
    """

    def __init__(
        self,
        index: Index,
        path: str,
        names: Sequence[str],
        restore: Restore,
        may_have_changed: Callable[[Sequence[Variable]], bool],
    ) -> None:
        self._index, self._path = index, path
        self._awaited = set(names)
        self._made: dict[str, Variable] = {}
        self._restore, self._may_have_changed = restore, may_have_changed

    def variable_made(self, variable: Variable) -> None:
        """Restore a variable that was awaited.

        Raises:
            CheckpointMismatchError: it has another shape or type.
            CheckpointError: the checkpoint is damaged, or is not there any more.
        """
        if variable.name in self._awaited:
            self._restore([variable])
            self._awaited.discard(variable.name)
            self._made[variable.name] = variable
            logger.info("restored %r from %s", variable.name, self._path)

    def variable_deleted(self, variable: Variable) -> None:
        """Forget a variable: another one of its name is not awaited."""
        self._made.pop(variable.name, None)

    def optimizer_made(self, name: str) -> None:
        """Restore what an optimizer had kept beside variables that were restored late. Raises as `variable_made`."""
        concerned = [
            variable for variable in self._made.values() if _is_used(self._index.variables[variable.name], name)
        ]
        if not concerned:
            return
        if self._may_have_changed(concerned):
            logger.warning(
                "optimizer %r begins with new slots, although %s has some: variables may have changed since they were "
                "restored. Make optimizers before functions are scheduled and values are assigned",
                name,
                self._path,
            )
            return
        self._restore(concerned)
        logger.info("restored what optimizer %r keeps from %s", name, self._path)


def _is_used(saved: SavedVariable, optimizer: str) -> bool:
    """Return whether an optimizer had applied gradients to a variable."""
    return any(optimizer in steps for steps in saved.steps)
