"""API keys at a listener for clients and operators: which keys are known, and which call needs which.

A gRPC interceptor lets a call through to its method or ends it there, before its message is read; the method then asks
`key_of` on whose behalf it works. The services named open need no key, every other one needs a key that is known, and
those named with a scope need that as well. Knows no method.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from cluster import rpc
from cluster.api_keys import ApiKey, Scope, digest_of, load_keys
from cluster.errors import ConfigError, PermissionDenied, Unauthenticated

HEADER = "authorization"
_SCHEME = "bearer"
LOOK_EVERY_S = 0.5

Stamp = tuple[int, int, int, int]
"""Differs between two states of a file: its inode, length, and when its text and anything else of it changed."""

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Metadata = Iterable[tuple[str, str | bytes]]


class KeyRing:
    """The keys that are known now; `replace` swaps all of them at once."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._by_digest: dict[str, ApiKey] = {}
        self.replace(keys)

    def __len__(self) -> int:
        return len(self._by_digest)

    def replace(self, keys: Iterable[ApiKey]) -> None:
        self._by_digest = {key.sha256: key for key in keys}

    def of_id(self, key_id: str) -> ApiKey | None:
        return next((key for key in self._by_digest.values() if key.id == key_id), None)

    def find(self, key: str) -> ApiKey | None:
        """The known key, or None. The lookup is by digest, which a caller cannot steer towards another key's; the
        digests are then compared in constant time."""
        digest = digest_of(key)
        known = self._by_digest.get(digest)
        return known if known is not None and hmac.compare_digest(known.sha256, digest) else None


class KeyFile:
    """The keys of one file, kept in `ring`: a changed file takes effect within about a second, a broken one changes
    nothing. Only `stat` runs on the event loop; a changed file is read and checked on a thread of its own, so that no
    other work keeps a key that is revoked."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError for a file that cannot be read or is wrong."""
        self._path = Path(path)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="keys")
        self._stamp = self._look()
        """Stamp of what is in `ring`: a file that could not be read is read again."""
        self._problem = ""
        """The last logged problem; each is logged once."""
        self.ring = KeyRing(load_keys(path))

    async def follow(self) -> None:
        """Watches the file until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await self.refresh()
            except Exception as error:  # whatever it is, the file is looked at again
                self._say(f"{type(error).__name__}: {error}")

    async def refresh(self) -> bool:
        """Reads the file if it has changed; True when its keys are in `ring`."""
        stamp = self._look()
        if stamp == self._stamp:
            self._problem = ""
            return False
        try:
            keys: tuple[ApiKey, ...] = await asyncio.get_running_loop().run_in_executor(
                self._thread, load_keys, self._path
            )
        except ConfigError as error:
            self._say(error.message)
            return False
        self._stamp, self._problem = stamp, ""
        self.ring.replace(keys)
        log.info("%d API keys from now on", len(keys))
        return True

    def _say(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            log.error("the API keys stay as they were: %s", problem)

    def _look(self) -> Stamp | None:
        """None: it is not there."""
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class Gate(rpc.CallGate):
    """`keys` None: no keys are needed. `scopes`: which one a service needs, by its full name."""

    def __init__(self, keys: KeyRing | None, scopes: Mapping[str, Scope], open_services: Iterable[str]) -> None:
        self._keys = keys
        self._scopes = dict(scopes)
        self._open = frozenset(open_services)

    def key_of(self, metadata: Metadata) -> ApiKey | None:
        """None where none is needed. Raises Unauthenticated, also for one revoked since its call was let through."""
        return None if self._keys is None else self._find(self._keys, metadata)

    def key_of_id(self, key_id: str) -> ApiKey | None:
        """The key on whose behalf a client asked for work earlier and has not waited for it: a line of a batch. None
        where none is needed. Raises Unauthenticated, or PermissionDenied."""
        if self._keys is None:
            return None
        key = self._keys.of_id(key_id)
        if key is None:
            raise Unauthenticated("the API key with which this was asked for is not known here any more")
        if "generate" not in key.scopes:
            raise PermissionDenied(f"API key {key.id} does not have the scope generate any more")
        return key

    def check(self, metadata: Metadata, service: str) -> None:
        """Raises Unauthenticated or PermissionDenied for a call of this service that may not go on."""
        if self._keys is not None and service not in self._open:
            self._check_scope(self._find(self._keys, metadata), service)

    def check_call(self, service: str, method: str, metadata: Metadata) -> None:
        self.check(metadata, service)

    def _check_scope(self, key: ApiKey, service: str) -> None:
        needed = self._scopes.get(service)
        if needed is not None and needed not in key.scopes:
            raise PermissionDenied(
                f"API key {key.id} does not have the scope {needed}, which {service} needs: it has "
                f"{', '.join(sorted(key.scopes))}"
            )

    @staticmethod
    def _find(keys: KeyRing, metadata: Metadata) -> ApiKey:
        sent = [value for name, value in metadata if name.lower() == HEADER]
        if not sent:
            raise Unauthenticated(f"an API key is needed: send it as `{HEADER}: Bearer KEY` with the call")
        value = sent[0]
        scheme, _, secret = (value if isinstance(value, str) else "").partition(" ")
        if len(sent) > 1 or scheme.lower() != _SCHEME or not secret.strip():
            raise Unauthenticated(f"the {HEADER} of a call must be one `Bearer KEY`, with an API key of this cluster")
        key = keys.find(secret.strip())
        if key is None:
            raise Unauthenticated("the API key is not known here: it was revoked, or belongs to another cluster")
        return key
