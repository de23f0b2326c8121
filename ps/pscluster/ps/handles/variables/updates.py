"""The updates of a variable: assignments, arithmetic, rows replaced or changed, all on the servers."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pscluster.ps.handles.indexing import IndexedSlices, gradient_of
from pscluster.ps.handles.rows.requests import row_updates
from pscluster.ps.handles.shard_requests import ShardRequests
from pscluster.v1 import ps_pb2


class VariableUpdates(ShardRequests):
    """What changes a variable's value: its whole, a box of it, or rows."""

    def assign(self, value: npt.ArrayLike, *, at: Any = None) -> Self:
        """Replace the value, or with `at` the box `v[at]`, by one that NumPy broadcasts to its shape.

        `at` consists of integers, slices and `...`.

        Args:
            value: numbers that NumPy broadcasts to the shape of the variable or box, and that fit its dtype.
            at: a box: an integer, a slice, `...`, or a tuple of these. Default: the whole variable.

        Returns:
            The variable.

        Raises:
            InvalidUpdateError: the value does not fit; nothing was changed on any shard.
            PSUnavailableError: a server is unreachable.
        """
        return self._update(ps_pb2.ASSIGN, value, at)

    def assign_add(self, delta: npt.ArrayLike, *, at: Any = None) -> Self:
        """Add to the value, or to a box of it, on the servers.

        Args:
            delta: what is added; as the value of `assign`.
            at: a box, as for `assign`.

        Returns:
            The variable.

        Raises:
            InvalidUpdateError: the delta does not fit; nothing was changed on any shard.
            PSUnavailableError: a server is unreachable.
        """
        return self._update(ps_pb2.ADD, delta, at)

    def assign_sub(self, delta: npt.ArrayLike, *, at: Any = None) -> Self:
        """Subtract from the value, or from a box of it, on the servers.

        Args:
            delta: what is subtracted; as the value of `assign`.
            at: a box, as for `assign`.

        Returns:
            The variable.

        Raises:
            InvalidUpdateError: the delta does not fit; nothing was changed on any shard.
            PSUnavailableError: a server is unreachable.
        """
        return self._update(ps_pb2.SUB, delta, at)

    def scatter_update(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Replace rows. Of duplicate ids, the last one counts.

        Args:
            sparse_delta: `IndexedSlices` of rows and their ids, (n, ...) and (n,).
            use_locking, name: ignored; TensorFlow has them.

        Returns:
            The variable.

        Raises:
            InvalidUpdateError: an id is not a row, or values do not fit; nothing was changed on any shard.
        """
        return self._scatter(ps_pb2.ASSIGN, sparse_delta, use_locking, name)

    def scatter_add(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Add to rows; duplicate ids add up.

        Args:
            sparse_delta: `IndexedSlices` of values and the rows' ids, (n, ...) and (n,).
            use_locking, name: ignored; TensorFlow has them.

        Raises:
            InvalidUpdateError: an id is not a row, or values do not fit; nothing was changed on any shard.

        Examples:
            >>> with strategy.scope():
            ...     table = Variable(np.zeros((5, 2)), name="rows")
            >>> table.scatter_add(IndexedSlices(np.ones((3, 2)), [4, 0, 4])).numpy()[:, 0]
            array([1., 0., 0., 0., 2.])
        """
        return self._scatter(ps_pb2.ADD, sparse_delta, use_locking, name)

    def scatter_sub(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Subtract from rows; duplicate ids add up.

        Args:
            sparse_delta: `IndexedSlices` of values and the rows' ids, (n, ...) and (n,).
            use_locking, name: ignored; TensorFlow has them.

        Raises:
            InvalidUpdateError: an id is not a row, or values do not fit; nothing was changed on any shard.
        """
        return self._scatter(ps_pb2.SUB, sparse_delta, use_locking, name)

    def scatter_mul(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Multiply rows; duplicate ids multiply.

        Args:
            sparse_delta: `IndexedSlices` of values and the rows' ids, (n, ...) and (n,).
            use_locking, name: ignored; TensorFlow has them.

        Raises:
            InvalidUpdateError: an id is not a row, or values do not fit; nothing was changed on any shard.
        """
        return self._scatter(ps_pb2.MUL, sparse_delta, use_locking, name)

    def scatter_div(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Divide rows; duplicate ids divide again.

        Args:
            sparse_delta: `IndexedSlices` of values and the rows' ids, (n, ...) and (n,).
            use_locking, name: ignored; TensorFlow has them.

        Raises:
            InvalidUpdateError: an id is not a row, or values do not fit; nothing was changed on any shard.
        """
        return self._scatter(ps_pb2.DIV, sparse_delta, use_locking, name)

    def scatter_min(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Replace rows by the minimum of row and value.

        Args:
            sparse_delta: `IndexedSlices` of values and the rows' ids, (n, ...) and (n,).
            use_locking, name: ignored; TensorFlow has them.

        Raises:
            InvalidUpdateError: an id is not a row, or values do not fit; nothing was changed on any shard.
        """
        return self._scatter(ps_pb2.MIN, sparse_delta, use_locking, name)

    def scatter_max(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Replace rows by the maximum of row and value.

        Args:
            sparse_delta: `IndexedSlices` of values and the rows' ids, (n, ...) and (n,).
            use_locking, name: ignored; TensorFlow has them.

        Raises:
            InvalidUpdateError: an id is not a row, or values do not fit; nothing was changed on any shard.
        """
        return self._scatter(ps_pb2.MAX, sparse_delta, use_locking, name)

    def batch_scatter_update(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Self:
        """Replace rows batch by batch: `v[i, ..., indices[i, ..., j]] = values[i, ..., j]`.

        Of duplicate ids, the last one counts. With one-dimensional indices, this is `scatter_update`.
        """
        self._check_slices(sparse_delta)
        if np.ndim(sparse_delta.indices) < 2:
            return self.scatter_update(sparse_delta, use_locking, name)
        with self.client.gate:
            self.client.update(self._batch_updates(sparse_delta))
        return self

    def _update(self, kind: ps_pb2.UpdateKind, value: npt.ArrayLike, at: Any) -> Self:
        with self.client.gate:
            self.client.update(self.shard_updates(kind, value, at))
        return self

    def _scatter(self, kind: ps_pb2.UpdateKind, slices: IndexedSlices, *_unused: object) -> Self:
        """Update rows. `_unused` are TensorFlow's other arguments, which have no effect here."""
        with self.client.gate:
            self.client.update(row_updates(kind, [(gradient_of(slices), self)])[0])
        return self
