"""torch's side of `decode_costs`: a DataLoader with processes that stay."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from decode_data import BATCH, WORKERS, decode, images
from driver import serve, timed


class Images(torch.utils.data.Dataset[Any]):
    """The images, decoded when they are asked for."""

    def __init__(self, count: int) -> None:
        self._images = images(count)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Any:
        return decode(self._images[index])


class Loader:
    """A loader of a size that is kept."""

    def __init__(self) -> None:
        self._loader: Any = None

    def epoch(self, count: int) -> float:
        """Seconds of an epoch of this number of images."""
        if self._loader is None:
            self._loader = torch.utils.data.DataLoader(
                Images(count), batch_size=BATCH, num_workers=WORKERS, persistent_workers=True
            )

        def all_of_them() -> None:
            assert sum(len(batch) for batch in self._loader) == count

        return timed(all_of_them)


def main() -> None:
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))  # torch imports the library's `profile`, not ours
    serve(lambda _: ({"epoch": Loader().epoch}, {"torch": torch.__version__}))


if __name__ == "__main__":
    main()
