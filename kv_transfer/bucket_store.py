"""A store of KV blocks behind a URL, such as s3://BUCKET/FOLDER, by fsspec: whatever has a file system there (S3 and
what speaks its protocol, Google's and Azure's storage, others) holds the objects of `kv_transfer.block_store`.

Puts of such storage are whole or not there, which is all that a reader needs; what is not is refused by the objects'
checksums. Credentials and endpoints are those of the protocol's own package, as its environment has them. Loads no
torch.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from cluster.errors import ConfigError
from kv_transfer.block_store import BlockStore, FolderStore, StoredObject

T = TypeVar("T")

RENEW_S = 3600.0
"""An object that is pushed again is written again when it is so old: storage of objects knows no other sign of use."""
_CHANGED = ("LastModified", "last_modified", "mtime", "updated", "created")
"""Where listings of the file systems have the time of the last write."""


class BucketStore:
    """Objects below a URL. Raises OSError for whatever its file system raises."""

    def __init__(self, url: str) -> None:
        """Raises ImportError, with what is to be installed, and ValueError for a protocol that nobody knows."""
        from fsspec.core import url_to_fs  # which those with a folder need not load

        self._files, root = _made(lambda: url_to_fs(url, use_listings_cache=False, skip_instance_cache=True))
        self._root = root.rstrip("/")

    def try_out(self) -> None:
        """Writes an object and deletes it. Raises OSError."""
        name = f"probe-{uuid.uuid4().hex}"
        _made(lambda: self._files.pipe_file(self._path(name), b"1"))
        self.delete(name)

    def put(self, name: str, content: bytes) -> bool:
        path = self._path(name)
        with suppress(FileNotFoundError):
            there = _made(lambda: self._files.info(path))
            if there["size"] == len(content) and time.time() - _changed_at(there) < RENEW_S:
                return False
        _made(lambda: self._files.pipe_file(path, bytes(content)))
        return True

    def get(self, name: str) -> bytes:
        content: bytes = _made(lambda: self._files.cat_file(self._path(name)))
        return content

    def has(self, name: str) -> bool:
        try:
            return int(_made(lambda: self._files.info(self._path(name)))["size"]) > 0
        except FileNotFoundError:
            return False

    def objects(self) -> Iterator[StoredObject]:
        found: dict[str, dict[str, Any]] = _made(lambda: self._files.find(self._root, detail=True))
        for path, there in found.items():
            yield StoredObject(path.removeprefix(self._root).lstrip("/"), int(there["size"]), _changed_at(there))

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            _made(lambda: self._files.rm_file(self._path(name)))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def store_at(path: str) -> BlockStore:
    """A folder's store, or a URL's. Raises ConfigError."""
    try:
        if "://" not in path:
            return FolderStore(Path(path))
        store = BucketStore(path)
        store.try_out()
        return store
    except (ImportError, ValueError) as error:
        raise ConfigError(f"kv_store_path: {path} cannot be used: {error}") from error
    except OSError as error:
        where = "it is made in a folder that every node has, such as a mount" if "://" not in path else "see its access"
        raise ConfigError(f"kv_store_path: {path} cannot be used: {error.strerror or error}; {where}") from error


def _made(call: Callable[[], T]) -> T:
    """What a call of a file system returns. Clients of storage raise errors of their own, which are OSErrors here."""
    try:
        return call()
    except (OSError, ImportError, ValueError):
        raise
    except Exception as error:
        raise OSError(None, f"{type(error).__name__}: {error}") from error


def _changed_at(there: dict[str, Any]) -> float:
    """Seconds since the epoch; 0 where a file system does not tell."""
    told = next((there[name] for name in _CHANGED if there.get(name) is not None), 0.0)
    if isinstance(told, str):
        told = datetime.fromisoformat(told)
    return told.timestamp() if isinstance(told, datetime) else float(told)
