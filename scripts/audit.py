"""Check the installed packages for known vulnerabilities, with pip-audit. `make check` runs this.

If the database of advisories is unreachable, warn but do not fail. pip-audit alone would report success when an index
answers that has packages but no advisories.
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
    """Return pip-audit's report on each package; nothing if it could not reach the database."""
    command = [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off"]
    try:
        done = subprocess.run(
            [*command, "--timeout", str(SECONDS), *arguments], capture_output=True, text=True, timeout=120
        )
        return json.loads(done.stdout)["dependencies"]
    except (ValueError, LookupError, subprocess.TimeoutExpired):
        return []


def main() -> int:
    """Return 1 if a vulnerability is known."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as one:  # try one package before a hundred
        one.write(f"pip=={metadata.version('pip')}\n")
        one.flush()
        reached = [
            package for package in audit("--requirement", one.name, "--no-deps", "--disable-pip") if "vulns" in package
        ]
    packages = audit("--skip-editable") if reached else []
    asked = [package for package in packages if "vulns" in package]
    if not asked:
        print("WARNING: advisories unreachable: NOT CHECKED for known vulnerabilities", file=sys.stderr)
        return 0
    vulnerable = [(package, vulnerability) for package in asked for vulnerability in package["vulns"]]
    for package, vulnerability in vulnerable:
        fixes = ", ".join(vulnerability["fix_versions"]) or "no version yet"
        print(f"{package['name']} {package['version']}: {vulnerability['id']}; fixed in: {fixes}", file=sys.stderr)
    unknown = f"; {len(packages) - len(asked)} are unknown there" if len(packages) > len(asked) else ""
    print(f"pip-audit: {len(asked)} packages, {len(vulnerable)} known vulnerabilities{unknown}")
    return bool(vulnerable)


if __name__ == "__main__":
    sys.exit(main())
