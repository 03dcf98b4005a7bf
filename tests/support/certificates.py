"""Certificates for tests, as files: authorities made on the spot, and what they sign."""

from __future__ import annotations

import datetime
import itertools
from pathlib import Path

import trustme

from cluster.tls import INTERNAL_NAME, ClientTls, InternalTls, ServerTls

_numbers = itertools.count(1)


class Authority:
    """One authority and the folder of its files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authority = trustme.CA()
        self.file = self._write("ca", self._authority.cert_pem)

    def issue(self, *names: str, is_expired: bool = False) -> tuple[str, str]:
        """Files of a certificate for these names and of its key."""
        now = datetime.datetime.now(datetime.UTC)
        day = datetime.timedelta(days=1)
        made = self._authority.issue_cert(
            *names, not_before=now - 2 * day, not_after=now + (-day if is_expired else day)
        )
        cert = self._write("cert", *made.cert_chain_pems)
        return cert, self._write("key", made.private_key_pem)

    def server(self, *names: str, clients: Authority | None = None, is_expired: bool = False) -> ServerTls:
        """For the public port; `clients` sign those who may connect."""
        cert, key = self.issue(*names or ("localhost", "127.0.0.1"), is_expired=is_expired)
        return ServerTls(cert, key, None if clients is None else clients.file)

    def client(self, *, showing: Authority | None = None, is_expired: bool = False) -> ClientTls:
        """Believes this authority, and shows a certificate of another."""
        if showing is None:
            return ClientTls(self.file)
        return ClientTls(self.file, *showing.issue("someone@example.org", is_expired=is_expired))

    def internal(self, name: str = INTERNAL_NAME, *, is_expired: bool = False) -> InternalTls:
        return InternalTls(*self.issue(name, is_expired=is_expired), self.file)

    def _write(self, kind: str, *parts: trustme.Blob) -> str:
        path = self._folder / f"{kind}-{next(_numbers)}.pem"
        path.write_bytes(b"".join(part.bytes() for part in parts))
        return str(path)
