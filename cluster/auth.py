"""Who may call what on a listener for clients and operators: the API key of a call, and what it opens.

A gRPC interceptor lets a call through to its method or ends it there, before its message is read; the method then asks
`key_of` on whose behalf it works. The services named open need no key, every other one needs a key that is known, and
those named with a scope need that as well. Knows no method.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import grpc

from cluster import rpc
from cluster.api_keys import ApiKey, Scope, digest_of
from cluster.errors import BatonError, PermissionDenied, Unauthenticated

HEADER = "authorization"
_SCHEME = "bearer"

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
        """Where the table is looked at depends on the digest alone, which who sends a key cannot steer towards another
        one's; whether it is that one is compared in constant time."""
        digest = digest_of(key)
        known = self._by_digest.get(digest)
        return known if known is not None and hmac.compare_digest(known.sha256, digest) else None


class Gate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
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
        """Whether a call of this service may go on. Raises Unauthenticated or PermissionDenied."""
        if self._keys is not None and service not in self._open:
            self._check_scope(self._find(self._keys, metadata), service)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        service = handler_call_details.method.rpartition("/")[0].lstrip("/")
        try:
            self.check(handler_call_details.invocation_metadata or (), service)
        except BatonError as error:
            return _refusal(error)
        return await continuation(handler_call_details)

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


def _refusal(error: BatonError) -> grpc.RpcMethodHandler[Any, Any]:
    """Ends a call of any kind at once: it reads none of the messages that may come."""

    async def refuse(_: object, context: Context) -> None:
        await rpc.abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
