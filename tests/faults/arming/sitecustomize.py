"""Imported by Python itself as it starts, where this folder is in PYTHONPATH: arm the faults of the environment."""

from __future__ import annotations

import sys

from tests.faults.arming.faults import arm

from pscluster.core.errors import ConfigurationError

try:
    arm()
except ConfigurationError as error:  # of other errors Python says a line, and goes on
    sys.exit(str(error))
