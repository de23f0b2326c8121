"""Make examples/data/digits.npz from the copy of the UCI handwritten digits that scikit-learn bundles.

Neither the project nor its tests need scikit-learn; this script does. Run it in a separate environment:

    python3 -m venv /tmp/digits && /tmp/digits/bin/pip install scikit-learn
    /tmp/digits/bin/python scripts/make_digits.py

The output is the same bytes every time. It is stored rather than deflated, because deflated bytes differ from
one version of zlib to the next. The SHA-256 it prints must be the one in examples/data/README.md.
"""

import hashlib
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

TARGET = Path(__file__).resolve().parent.parent / "examples" / "data" / "digits.npz"


def main() -> None:
    digits = load_digits()
    images, labels = digits.data.astype(np.uint8), digits.target.astype(np.uint8)
    if not np.array_equal(images, digits.data):
        raise SystemExit("scikit-learn's pixels are no longer whole numbers from 0 to 16")
    np.savez(TARGET, images=images, labels=labels)
    data = TARGET.read_bytes()
    print(f"{TARGET.name}: {len(data)} bytes, SHA-256 {hashlib.sha256(data).hexdigest()}")


if __name__ == "__main__":
    main()
