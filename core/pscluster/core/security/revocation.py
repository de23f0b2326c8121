"""Certificates that are refused though their CA has signed them: listed ones, and expired ones of resumed sessions.

The list is a text file beside the certificates. Each line holds either the serial number of a certificate, in
hexadecimal digits as OpenSSL prints it, or the SHA-256 fingerprint, 64 digits, of a certificate or of a public key (its
SubjectPublicKeyInfo in DER, which a renewed certificate keeps). Colons, case, and comments after a # are ignored.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
from dataclasses import dataclass

from pscluster.core.errors import ConfigurationError

REVOKED = "revoked.txt"
_FINGERPRINT_DIGITS = 64
_MAX_SERIAL_DIGITS = 40  # RFC 5280: 20 bytes


def parse_revoked(text: str, source: str) -> frozenset[str]:
    """Return the entries of a list. Raise ConfigurationError for an invalid line."""
    entries = set()
    for line_number, line in enumerate(text.splitlines(), 1):
        entry = line.partition("#")[0].replace(":", "").strip().lower().removeprefix("serial=")
        if not entry:
            continue
        is_hexadecimal = all(digit in "0123456789abcdef" for digit in entry)
        if not is_hexadecimal or not (len(entry) <= _MAX_SERIAL_DIGITS or len(entry) == _FINGERPRINT_DIGITS):
            raise ConfigurationError(
                f"{source}, line {line_number}: {line[:80]!r} is neither a serial number, of up to "
                f"{_MAX_SERIAL_DIGITS} hexadecimal digits, nor a SHA-256 fingerprint, of {_FINGERPRINT_DIGITS}; "
                "`openssl x509 -noout -serial -fingerprint -sha256 -in tls.crt` prints both"
            )
        entries.add(entry if len(entry) == _FINGERPRINT_DIGITS else entry.lstrip("0") or "0")
    return frozenset(entries)


@dataclass(frozen=True, slots=True)
class Shown:
    """A certificate that a caller has shown."""

    names: frozenset[str]  # serial number and fingerprints
    ends: datetime.datetime


@functools.lru_cache(maxsize=1024)
def read_shown(pem: bytes) -> Shown:
    """Read a certificate that TLS has accepted."""
    from cryptography import x509  # slow to import, and needed only with TLS
    from cryptography.hazmat.primitives import hashes, serialization

    certificate = x509.load_pem_x509_certificate(pem)
    key = certificate.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    names = (
        f"{certificate.serial_number:x}",
        certificate.fingerprint(hashes.SHA256()).hex(),
        hashlib.sha256(key).hexdigest(),
    )
    return Shown(frozenset(names), certificate.not_valid_after_utc)


def why_refused(pem: bytes, revoked: frozenset[str], *, resumed: bool) -> str | None:
    """Return why a caller with this certificate is refused, if it is; in a `resumed` session TLS checks no date."""
    shown = read_shown(pem)
    if revoked & shown.names:
        return "the caller's certificate was revoked: give this process another key and certificate"
    if resumed and shown.ends < datetime.datetime.now(datetime.UTC):
        return (
            f"the caller's certificate expired at {shown.ends:%Y-%m-%d %H:%M} UTC, after its TLS session began: "
            "`pscluster certs DIR --renew` makes new ones for the same CA"
        )
    return None
