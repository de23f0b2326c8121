"""Certificates for development and for clusters without a CA of their own: `pscluster certs`.

    ca.crt, ca.key                          the CA; only renewal needs its key, no role does
    ROLE/tls.crt, ROLE/tls.key, ROLE/ca.crt the files of that role's processes: see `tls`

Keys are ECDSA on P-256, which every TLS library supports and which costs a handshake little. Only the owner can read
the files. New files appear atomically; existing ones stay, unless they are being renewed.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import ipaddress
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pscluster.core.cluster.addresses import split_address
from pscluster.core.cluster.spec import ClusterSpec
from pscluster.core.errors import ConfigurationError
from pscluster.core.security.access import ROLE_URI, ROLES, role_host
from pscluster.core.security.tls import AUTHORITIES, CERTIFICATE, KEY
from pscluster.core.transport.unix_sockets import path_of

DAYS = 365
_CA_DAYS = 3650
_CA_KEY = "ca.key"
_JOBS = {"ps": "ps", "worker": "worker", "chief": "coordinator"}
_LOCAL = ("localhost", "127.0.0.1", "::1")
_EARLIER = datetime.timedelta(minutes=5)  # clocks differ


def hosts_of(cluster: ClusterSpec) -> dict[str, set[str]]:
    """Return, by role, the hosts of a cluster's tasks."""
    return {
        role: {
            split_address(address)[0]
            for index in cluster.task_indices(job)
            if path_of(address := cluster.task_address(job, index)) is None
        }
        for job, role in _JOBS.items()
        if job in cluster.jobs
    }


def make_certificates(
    folder: Path, hosts: Iterable[str] = (), by_role: Mapping[str, Iterable[str]] | None = None, days: float = DAYS
) -> bool:
    """Create a CA, and a certificate and a key for each role, in a new folder. False if there are some, which stay.

    Of several concurrent calls, one creates them.

    Args:
        hosts: names and IP addresses by which all roles are reached, beside localhost.
        by_role: more of them, for one role each.
        days: validity of the roles' certificates; the CA's is at least ten years.

    Raises:
        ConfigurationError: the files can't be written, or a host is neither a name nor an address.
    """
    if (folder / AUTHORITIES).exists():
        return False
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"pscluster CA {secrets.token_hex(4)}")])
    authority = (
        _builder(name, name, key.public_key(), max(days, _CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    draft = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    hosts = list(hosts)
    try:
        draft.mkdir(mode=0o700)
        try:
            _write(draft / AUTHORITIES, _pem(authority))
            _write(draft / _CA_KEY, _key_pem(key))
            for role in ROLES:
                (draft / role).mkdir(mode=0o700)
                own = ec.generate_private_key(ec.SECP256R1())
                names = [*hosts, *(by_role or {}).get(role, ())]
                _write(draft / role / AUTHORITIES, _pem(authority))
                _write(draft / role / KEY, _key_pem(own))
                _write(draft / role / CERTIFICATE, _pem(_issue(role, own.public_key(), names, days, authority, key)))
            draft.rename(folder)  # over nothing or an empty folder; fails if another process was quicker
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and (folder / AUTHORITIES).exists():
                return False
            raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise ConfigurationError(
            f"can't make the certificates' folder {folder}: {error.strerror}; name one that does not exist yet, in a "
            "folder you may write to"
        ) from error
    return True


def hosts_in(folder: Path, role: str) -> set[str]:
    """Return the hosts for which the role's certificate is valid. Raises as `renew_certificates`."""
    with _explained(folder):
        return set(_hosts_of(x509.load_pem_x509_certificate((folder / role / CERTIFICATE).read_bytes())))


def renew_certificates(
    folder: Path, hosts: Iterable[str] = (), days: float = DAYS, by_role: Mapping[str, Iterable[str]] | None = None
) -> None:
    """Issue new certificates of the same CA for the same keys and hosts, and more hosts. Running roles reload them.

    `hosts` are added for all roles, `by_role` for one each. Raise ConfigurationError if `make_certificates` has made
    none there, or they can't be written.
    """
    with _explained(folder):
        authority = x509.load_pem_x509_certificate((folder / AUTHORITIES).read_bytes())
        key = serialization.load_pem_private_key((folder / _CA_KEY).read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        hosts = list(hosts)
        for role in ROLES:
            path = folder / role / CERTIFICATE
            old = x509.load_pem_x509_certificate(path.read_bytes())
            names = [*_hosts_of(old), *hosts, *(by_role or {}).get(role, ())]
            public = old.public_key()
            assert isinstance(public, ec.EllipticCurvePublicKey)
            draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
            _write(draft, _pem(_issue(role, public, names, days, authority, key)))
            draft.replace(path)  # atomic: a role that checks just now finds one or the other


def _hosts_of(certificate: x509.Certificate) -> list[str]:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names if not isinstance(name, x509.UniformResourceIdentifier)]


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Raise ConfigurationError for files that can't be used, or are not as `make_certificates` makes them."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"can't renew the certificates in {folder}: {error.filename}: {error.strerror}; name the folder that "
            "`pscluster certs` made, with its ca.key"
        ) from error
    except (ValueError, AssertionError, x509.ExtensionNotFound) as error:
        raise ConfigurationError(
            f"can't renew the certificates in {folder}: they are not as `pscluster certs` made them ({error}); name "
            "another folder and make new ones"
        ) from None


def _issue(
    role: str,
    public: ec.EllipticCurvePublicKey,
    hosts: Iterable[str],
    days: float,
    authority: x509.Certificate,
    key: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    names = [_name(host) for host in dict.fromkeys([*_LOCAL, role_host(role), *hosts])]
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH, *([] if role == "tool" else [ExtendedKeyUsageOID.SERVER_AUTH])]
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"pscluster {role}")])
    return (
        _builder(subject, authority.subject, public, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.SubjectAlternativeName([*names, x509.UniformResourceIdentifier(ROLE_URI + role)]), critical=False
        )
        .sign(key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    ends = now + datetime.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, ends) - _EARLIER)
        .not_valid_after(ends)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _name(host: str) -> x509.GeneralName:
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    try:
        split_address(f"{host}:1")
        return x509.DNSName(host.lower())
    except (ConfigurationError, ValueError):
        raise ConfigurationError(
            f"--host {host!r} is neither a name nor an IP address; give one such as ps0.example.com or 192.0.2.1"
        ) from None


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, data: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
