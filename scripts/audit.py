"""Known weaknesses of what is installed beside us, by pip-audit: `make check` runs this.

Without the database of advisories nothing is known: that is said aloud, and is no failure. pip-audit alone would call
it success where an index answers that has packages but no advisories.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib import metadata
from typing import Any

SECONDS = 10


def audit(*arguments: str) -> list[dict[str, Any]]:
    """What pip-audit says of each package; nothing if it could not ask."""
    command = [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off"]
    try:
        done = subprocess.run(
            [*command, "--timeout", str(SECONDS), *arguments], capture_output=True, text=True, timeout=120
        )
        return json.loads(done.stdout)["dependencies"]
    except (ValueError, LookupError, subprocess.TimeoutExpired):
        return []


def main() -> int:
    """1 if a weakness is known."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as one:  # asks for one package before it asks for a hundred
        one.write(f"pip=={metadata.version('pip')}\n")
        one.flush()
        reached = [each for each in audit("--requirement", one.name, "--no-deps", "--disable-pip") if "vulns" in each]
    found = audit("--skip-editable") if reached else []
    asked = [each for each in found if "vulns" in each]
    if not asked:
        print("WARNING: advisories not reachable: NOT CHECKED for known weaknesses", file=sys.stderr)
        return 0
    weak = [(each, weakness) for each in asked for weakness in each["vulns"]]
    for each, weakness in weak:
        mend = ", ".join(weakness["fix_versions"]) or "none yet"
        print(f"{each['name']} {each['version']}: {weakness['id']}; mended in: {mend}", file=sys.stderr)
    left = f"; {len(found) - len(asked)} are unknown there" if len(found) > len(asked) else ""
    print(f"pip-audit: {len(asked)} packages, {len(weak)} known weaknesses{left}")
    return bool(weak)


if __name__ == "__main__":
    sys.exit(main())
