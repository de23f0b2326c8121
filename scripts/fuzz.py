"""Fuzz every decoder: python scripts/fuzz.py --inputs 1000000. Inputs that reveal a bug are saved in tests/fuzz/found.

The same numbers give the same inputs; --first is the first one. Time and memory are limited for each input, and memory
for the process (RLIMIT_AS), so that an input that would use all of the machine's raises MemoryError.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.fuzz.decoders import Decoder, all_decoders, seeded  # noqa: E402
from tests.fuzz.mutations import mutated  # noqa: E402

SECONDS = 2.0  # of this thread's CPU time
HANGS = 60.0  # seconds by the clock
GROWTH = 64 << 20
ADDRESS_SPACE = 3 << 30


def peak() -> int:
    """Return this process's peak memory in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


class HangsError(Exception):
    """A decoder does not return."""


def give_up(_number: int, _frame: object) -> None:
    """Handle the alarm."""
    raise HangsError(f"not within {HANGS:g} s")


def one(decoder: Decoder, data: bytes) -> tuple[bool, str]:
    """Return whether the decoder refused the input, and what went wrong, if anything."""
    before, begin = peak(), time.thread_time()
    try:
        signal.setitimer(signal.ITIMER_REAL, HANGS)
        try:
            refused = decoder.try_(data)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        where = traceback.extract_tb(error.__traceback__)[-1]
        return False, f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {error}"[:300]
    if (took := time.thread_time() - begin) > SECONDS:
        return refused, f"it took {took:.1f} s"
    if (grown := peak() - before) > GROWTH:
        return refused, f"it took {grown >> 20} MiB"
    return refused, ""


def main() -> int:
    """Fuzz. Return 1 if a bug was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000, help="in all, spread over the decoders")
    parser.add_argument("--first", type=int, default=0, help="number of each decoder's first input")
    parser.add_argument("--only", action="append", help="name of a decoder")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, resource.getrlimit(resource.RLIMIT_AS)[1]))
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("error")
    signal.signal(signal.SIGALRM, give_up)
    kept: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        decoders = [
            decoder for decoder in all_decoders(Path(folder)) if not arguments.only or decoder.name in arguments.only
        ]
        share = -(-arguments.inputs // len(decoders))
        for decoder in decoders:
            begin, refused = time.monotonic(), 0
            for input_number in range(arguments.first, arguments.first + share):
                source = seeded(decoder.name, input_number)
                data = mutated(source, decoder.examples)
                if source.random() < 0.8:
                    data = decoder.fit(data)
                was_refused, wrong = one(decoder, data)
                refused += was_refused
                if wrong:
                    key = f"{decoder.name}: {wrong.partition(': ')[0]}"
                    kept[key] += 1
                    if kept[key] <= 2:
                        print(f"{decoder.name}, input {input_number}: {wrong}", flush=True)
                        name = f"{decoder.name}-{hashlib.sha256(data).hexdigest()[:12]}"
                        (ROOT / "tests/fuzz/found" / name).write_bytes(data)
            took = time.monotonic() - begin
            print(
                f"{decoder.name:10} {share:,} inputs, {refused / share:.0%} refused, {took:.0f} s, "
                f"{took / share * 1e6:.0f} us each, peak {peak() >> 20} MiB",
                flush=True,
            )
    for key, count in kept.most_common():
        print(f"{count} x {key}")
    return bool(kept)


if __name__ == "__main__":
    sys.exit(main())
