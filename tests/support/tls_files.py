"""Certificates and keys for servers and clients that use TLS."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.support.servers import HOST

Signer = tuple[x509.Name, ec.EllipticCurvePrivateKey]  # name and key of who signs a certificate


@dataclass
class Certificates:
    """Paths of PEM files: a CA, a server's and a client's certificate for 127.0.0.1, and a CA that signed neither."""

    ca: str
    server: str
    server_key: str
    client: str
    client_key: str
    other_ca: str


def _key_usage(*, ca: bool) -> x509.KeyUsage:
    uses = dict.fromkeys(
        (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    return x509.KeyUsage(digital_signature=True, key_cert_sign=ca, crl_sign=ca, **uses)


def make_certificates(folder: Path) -> Certificates:
    """Write all files into a folder; the certificates are valid today."""
    now = dt.datetime.now(dt.timezone.utc)

    def make(name: str, signer: Signer | None) -> tuple[str, str, Signer]:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        issuer, issuer_key = signer or (subject, key)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=signer is None, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST))]), critical=False)
            # Python 3.13 and later refuse a certificate without these three.
            .add_extension(_key_usage(ca=signer is None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
            .sign(issuer_key, hashes.SHA256())
        )
        paths = folder / f"{name}.crt", folder / f"{name}.key"
        paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        paths[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return str(paths[0]), str(paths[1]), (subject, key)

    ca, _, signer = make("ca", None)
    server, server_key, _ = make("server", signer)
    client, client_key, _ = make("client", signer)
    other_ca, _, _ = make("other-ca", None)
    return Certificates(ca, server, server_key, client, client_key, other_ca)


def encrypt_key(source: str, target: str) -> None:
    """Write a private key protected by the password "key-password"."""
    key = serialization.load_pem_private_key(Path(source).read_bytes(), None)
    encryption = serialization.BestAvailableEncryption(b"key-password")
    Path(target).write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    )
