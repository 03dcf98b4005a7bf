"""TLS as Baton's listeners and clients use it: which files, what they are checked for, and what gRPC and sockets get.

Two kinds: the public port shows a certificate to clients and may ask for theirs; between Baton's own processes both
sides show one and both verify it. Those processes move between addresses, so their certificates carry the DNS name
`baton` instead of a host's, and the authority that signs them must sign nothing else. Files are read once, at the
start of a process. Knows no service.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import grpc

from cluster.address import is_loopback
from cluster.config.access import InternalTlsSection, TlsSection
from cluster.errors import ConfigError

INTERNAL_NAME = "baton"
"""The name in each certificate of `internal_tls`."""


@dataclass(frozen=True)
class ServerTls:
    """The certificate of a listener, and the clients that it admits."""

    cert: str
    """File with its certificate and those between it and its authority, PEM."""
    key: str
    """File with the private key, PEM, not encrypted."""
    client_ca: str | None = None
    """File with the authorities of clients, who must show a certificate of one of them; None: clients show nothing."""

    def credentials(self) -> grpc.ServerCredentials:
        """Raises ConfigError for files that cannot be used."""
        self.context()
        pair = (Path(self.key).read_bytes(), Path(self.cert).read_bytes())
        roots = None if self.client_ca is None else Path(self.client_ca).read_bytes()
        return grpc.ssl_server_credentials([pair], roots, require_client_auth=roots is not None)

    def context(self) -> ssl.SSLContext:
        """The TLS context for sockets."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        _load_pair(context, self.cert, self.key)
        if self.client_ca is not None:
            _load_authorities(context, self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def require_tls(doing: str, host: str, tls: ServerTls | None, *, insecure: bool) -> None:
    """Call for every listener. Raises ConfigError beyond loopback without TLS; `doing`: such as `listen`."""
    if not is_loopback(host) and tls is None and not insecure:
        raise ConfigError(
            f"refusing to {doing} on {host!r} without TLS: set up TLS (docs/security.md), use 127.0.0.1, or allow it "
            "with `insecure` where the network keeps strangers out"
        )


@dataclass(frozen=True)
class ClientTls:
    """The authorities that a client trusts, and its own certificate."""

    ca: str
    """File with the authorities of the server, PEM."""
    cert: str | None = None
    """File with the client's own certificate, where the server wants one."""
    key: str | None = None
    """File with its private key."""
    name: str | None = None
    """The name that the server's certificate must carry; None: the host that is called."""

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises ConfigError for files that cannot be used."""
        self.context()
        key, cert = (None if path is None else Path(path).read_bytes() for path in (self.key, self.cert))
        return grpc.ssl_channel_credentials(Path(self.ca).read_bytes(), key, cert)

    @property
    def options(self) -> list[tuple[str, str]]:
        """Options of a gRPC channel."""
        return [] if self.name is None else [("grpc.ssl_target_name_override", self.name)]

    def context(self) -> ssl.SSLContext:
        """The TLS context for sockets; the caller names the server."""
        if (self.cert is None) != (self.key is None):
            given, missing = ("certificate", "key") if self.key is None else ("key", "certificate")
            raise ConfigError(f"the {given} of a client is of no use without its {missing}; name both files or neither")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        _load_authorities(context, self.ca)
        if self.cert is not None and self.key is not None:
            _load_pair(context, self.cert, self.key)
        return context


@dataclass(frozen=True)
class InternalTls:
    """One identity of the cluster, for either side of a connection between its processes."""

    cert: str
    key: str
    ca: str

    @property
    def server(self) -> ServerTls:
        return ServerTls(self.cert, self.key, client_ca=self.ca)

    @property
    def client(self) -> ClientTls:
        return ClientTls(self.ca, self.cert, self.key, name=INTERNAL_NAME)

    @property
    def page(self) -> ServerTls:
        """The TLS of a metrics page: encrypted, but a reader needs no certificate, since ours can command workers."""
        return ServerTls(self.cert, self.key)


def internal_tls_of(section: InternalTlsSection) -> InternalTls | None:
    """None: between processes nothing is encrypted. Raises ConfigError when only a part is named."""
    cert, key, ca = section.cert, section.key, section.ca
    if cert is None and key is None and ca is None:
        return None
    if cert is None or key is None or ca is None:
        raise ConfigError("internal TLS needs a certificate, its key and an authority; name all three files or none")
    return InternalTls(cert, key, ca)


def public_tls_of(section: TlsSection) -> ServerTls | None:
    """None: the public port is not encrypted. Raises ConfigError when only a part is named."""
    cert, key, client_ca = section.cert, section.key, section.client_ca
    if cert is None and key is None and client_ca is None:
        return None
    if cert is None or key is None:
        raise ConfigError("TLS needs a certificate and its key; name both files, with or without a client_ca, or none")
    return ServerTls(cert, key, client_ca)


def _load_pair(context: ssl.SSLContext, cert: str, key: str) -> None:
    def refuse_password() -> NoReturn:
        raise ConfigError(f"{key}: the private key is encrypted; name one without a passphrase, readable by you alone")

    for path in (cert, key):
        _must_be_readable(path)
    try:
        context.load_cert_chain(cert, key, password=refuse_password)
    except ssl.SSLError as error:
        what = "are not a pair" if "MISMATCH" in str(error.reason) else f"are not both PEM ({error.reason or error})"
        raise ConfigError(f"the certificate {cert} and the private key {key} {what}") from error


def _load_authorities(context: ssl.SSLContext, path: str) -> None:
    _must_be_readable(path)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(f"{path}: holds no certificate of an authority in PEM ({error.reason or error})") from error


def _must_be_readable(path: str) -> None:
    try:
        with open(path, "rb"):
            return
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
