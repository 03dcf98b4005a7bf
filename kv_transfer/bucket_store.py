"""A store of KV blocks behind a URL, such as s3://BUCKET/FOLDER, by fsspec: whatever has a file system there (S3 and
what speaks its protocol, Google's and Azure's storage, others) holds the objects of `kv_transfer.block_store`.

Puts of such storage are whole or not there, which is all that a reader needs; what is not is refused by the objects'
checksums. Credentials and endpoints are those of the protocol's own package, as its environment has them. Loads no
torch.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from cluster.errors import ConfigError
from cluster.kv_groups import LOOK_TIMEOUT_S
from kv_transfer.block_store import MOVE_TIMEOUT_S, BlockStore, FolderStore, StoredObject

T = TypeVar("T")

START_TIMEOUT_S = 15.0
"""The most that a worker which starts waits for an answer: clients try again several times before they say what is
wrong."""
RENEW_S = 3600.0
"""An object that is pushed again is written again when it is so old: storage of objects knows no other sign of use."""
_BUCKET = "the bucket must be there, and workers write, read, list and delete objects in it"
_AT_ONCE = 32
"""Folders that are listed, or objects that are deleted, at once."""
_NAMESPACE, _DIGESTS = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{2}")
"""The folder of a namespace, and those in it by the first byte of a digest."""
_CHANGED = ("LastModified", "last_modified", "mtime", "updated", "created")
"""Where listings of the file systems have the time of the last write."""


class BucketStore:
    """Objects below a URL. Raises OSError for whatever its file system raises, and after a bounded time."""

    def __init__(self, url: str) -> None:
        """Raises ImportError, with what is to be installed, and ValueError for a protocol that nobody knows."""
        from fsspec.asyn import AsyncFileSystem  # which those with a folder need not load
        from fsspec.core import url_to_fs

        self._files, root = _made(lambda: url_to_fs(url, use_listings_cache=False, skip_instance_cache=True))
        self._root = root.rstrip("/")
        self._is_async = isinstance(self._files, AsyncFileSystem)

    def try_out(self) -> None:
        """Writes an object and deletes it. Raises OSError."""
        name = f"probe-{uuid.uuid4().hex}"
        self._call("pipe_file", name, b"1", timeout_s=START_TIMEOUT_S)
        self.delete(name)

    def put(self, name: str, content: bytes) -> bool:
        with suppress(FileNotFoundError):
            there = self._call("info", name) if self.has(name) else {"size": 0}
            if there["size"] == len(content) and time.time() - _changed_at(there) < RENEW_S:
                return False
        self._call("pipe_file", name, bytes(content))
        return True

    def get(self, name: str) -> bytes:
        content: bytes = self._call("cat_file", name, start=0)  # without a start, S3's asks for the size before
        return content

    def has(self, name: str) -> bool:
        """Reads a byte: to ask for what is not there takes two calls, of which one lists."""
        try:
            return bool(self._call("cat_file", name, start=0, end=1))
        except FileNotFoundError:
            return False

    def objects(self) -> Iterator[StoredObject]:
        """Lists some folders at a time: a listing takes 6 kB of memory for each object. Looks into no other folders."""
        namespaces = self._folders([self._root], _NAMESPACE)
        for found in self._listings(self._folders(namespaces, _DIGESTS)):
            for there in found:
                name = there["name"].removeprefix(self._root).strip("/")
                yield StoredObject(name, int(there["size"]), _changed_at(there))

    def _folders(self, above: Sequence[str], name: re.Pattern[str]) -> list[str]:
        there = (each["name"].rstrip("/") for found in self._listings(above) for each in found)
        return [path for path in there if name.fullmatch(path.rpartition("/")[2])]

    def _listings(self, folders: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
        """What lies in each folder that is there."""
        for found in self._at_once("ls", folders, detail=True):
            yield found or []

    def delete(self, *names: str) -> None:
        for _ in self._at_once("rm_file", [self._path(name) for name in names]):
            pass

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _call(self, method: str, name: str, *arguments: bytes, timeout_s: float | None = None, **options: int) -> Any:
        timeout = {"timeout": timeout_s or MOVE_TIMEOUT_S} if self._is_async else {}
        return _made(lambda: getattr(self._files, method)(self._path(name), *arguments, **options, **timeout))

    def _at_once(self, method: str, paths: Sequence[str], **options: bool) -> Iterator[Any]:
        """Yields what a method returns for each path, some at once where the file system can; None for what is not
        there."""
        from fsspec.asyn import get_loop, sync

        async def of(path: str) -> Any:
            with suppress(FileNotFoundError):
                if self._is_async:
                    return await getattr(self._files, f"_{method}")(path, **options)
                return getattr(self._files, method)(path, **options)

        async def of_all(some: Sequence[str]) -> list[Any]:
            return await asyncio.gather(*map(of, some))

        for begin in range(0, len(paths), _AT_ONCE):
            some = paths[begin : begin + _AT_ONCE]
            yield from _made(partial(sync, get_loop(), of_all, some, timeout=LOOK_TIMEOUT_S))


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
        where = _BUCKET if "://" in path else "it is made in a folder that every node has, such as a mount"
        raise ConfigError(f"kv_store_path: {path} cannot be used: {error.strerror or error}; {where}") from error


def _made(call: Callable[[], T]) -> T:
    """What a call of a file system returns. Clients of storage raise errors of their own, which are OSErrors here."""
    try:
        return call()
    except TimeoutError as error:
        raise TimeoutError(str(error) or "there was no answer in time") from error
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
