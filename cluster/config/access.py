"""The part of the schema that says who may use a cluster, and how it is encrypted: `auth`, `tls`, `internal_tls`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AuthSection:
    """Access to the public port; docs/security.md."""

    keys_file: str | None = None
    """File of API keys, relative to the folder of this file; `baton keys create` makes it, and a change counts within
    about a second. null: nobody needs a key."""


@dataclass(frozen=True)
class TlsSection:
    """TLS of the router's public port. Paths are relative to the folder of this file."""

    cert: str | None = None
    """File with the router's certificate and those between it and its authority, PEM; null: no TLS."""
    key: str | None = None
    """File with its private key, PEM, not encrypted."""
    client_ca: str | None = None
    """File with the authorities of clients, who must then show a certificate; null: they need none."""


@dataclass(frozen=True)
class InternalTlsSection:
    """TLS between the cluster's own processes, with certificates that both sides show and verify. The files must be at
    the same place on every node."""

    cert: str | None = None
    """File with the certificate of every process, PEM, with the DNS name `baton`; null: no TLS."""
    key: str | None = None
    """File with its private key, PEM, not encrypted."""
    ca: str | None = None
    """File with the authority that signed it, and that signs for this cluster only."""
