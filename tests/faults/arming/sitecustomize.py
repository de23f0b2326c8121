"""Imported by Python when it starts, if this folder is in PYTHONPATH: arms the faults named by the environment."""

from __future__ import annotations

import sys

from pscluster.core.importing import without_collections

with without_collections():
    from tests.faults.arming.faults import arm

    from pscluster.core.errors import ConfigurationError

try:
    arm()
except ConfigurationError as error:  # for other errors Python prints a line, and continues
    sys.exit(str(error))
