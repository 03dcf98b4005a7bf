"""Headers of KV that is kept outside of the process: a page each, with a checksum of its own; and what encrypts the KV
behind them. Loads no torch."""

from __future__ import annotations

import hmac
import os
import stat
from pathlib import Path
from struct import Struct
from typing import Any

import xxhash

from cluster.errors import ConfigError, Corrupted
from cluster.kv_groups import DISK_PAGE as PAGE

Key = tuple[int, bytes]
"""The group of layers, and the digest of a block's tokens and all before them."""
_SUM = Struct("<Q")
_NONCE_BYTES, _TAG_BYTES = 12, 16
_LEAST_SECRET, _MOST_SECRET = 32, 4096


def sealed(header: bytes, box: bytes = b"") -> bytes:
    """A page with a header, its checksum, and what opens the block behind it if that is encrypted."""
    return (header + _SUM.pack(xxhash.xxh3_64_intdigest(header)) + box).ljust(PAGE, b"\0")


def unsealed(page: bytes, form: Struct) -> tuple[Any, ...] | None:
    """The fields of a sealed header; None where it is none."""
    header = page[: form.size]
    (checksum,) = _SUM.unpack_from(page, form.size)
    return form.unpack(header) if xxhash.xxh3_64_intdigest(header) == checksum else None


class KvSecret:
    """What KV outside of the process is encrypted with, of a file. Under another secret everything has another name."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.size_bytes = len(secret)

    @classmethod
    def read(cls, path: Path) -> KvSecret:
        """Raises ConfigError for a file that is missing, too short, or readable by others."""
        try:
            with path.expanduser().open("rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                secret = file.read(_MOST_SECRET + 1)
        except OSError as error:
            raise ConfigError(f"kv_key_file: {path} cannot be read: {error.strerror}") from error
        if mode & 0o077:
            raise ConfigError(
                f"kv_key_file: {path} has mode {mode:04o}: others than its owner may read it; chmod 600 it"
            )
        if not _LEAST_SECRET <= len(secret) <= _MOST_SECRET:
            sizes = f"{_LEAST_SECRET} to {_MOST_SECRET} bytes, such as 32 of /dev/urandom"
            raise ConfigError(f"kv_key_file: {path} must hold {sizes} (got {len(secret)})")
        return cls(secret)

    def namespace(self, of: bytes) -> bytes:
        """The namespace of what is encrypted, in place of that which is not."""
        return hmac.digest(self._secret, b"namespace" + of, "sha256")

    def cipher(self, namespace: bytes) -> BlockCipher:
        """Raises ConfigError where the library is missing."""
        return BlockCipher(hmac.digest(self._secret, b"blocks" + namespace, "sha256"))


class BlockCipher:
    """AES-256-GCM with a nonce at random for each block: under one key up to 2^32 of them. From any thread."""

    def __init__(self, key: bytes) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise ConfigError("kv_key_file: needs the package cryptography: pip install 'baton[encryption]'") from error
        self._gcm, self._wrong = AESGCM(key), InvalidTag

    def encrypt(self, payload: bytes | memoryview, about: bytes) -> tuple[bytes, bytes]:
        """Returns what opens it again, for the header, and the block. `about` is not hidden; no other opens it."""
        nonce = os.urandom(_NONCE_BYTES)
        found = self._gcm.encrypt(nonce, payload, about)
        return nonce + found[-_TAG_BYTES:], found[:-_TAG_BYTES]

    def decrypt(self, page: bytes, form: Struct, payload: bytes | memoryview, about: bytes) -> bytearray:
        """`page`: sealed, with a header of that form. Raises Corrupted."""
        begin = form.size + _SUM.size
        nonce, tag = page[begin : begin + _NONCE_BYTES], page[begin + _NONCE_BYTES : begin + _NONCE_BYTES + _TAG_BYTES]
        try:
            return bytearray(self._gcm.decrypt(nonce, b"".join((payload, tag)), about))
        except self._wrong:
            raise Corrupted("an encrypted block is damaged, or another one") from None
