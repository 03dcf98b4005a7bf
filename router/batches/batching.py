"""Files and batches of one router: the store that the settings name, who works on batches, and the routes to both."""

from __future__ import annotations

from starlette.requests import Request
from starlette.routing import Route

from cluster.auth import Gate
from cluster.errors import NotServed
from cluster.settings import RouterSettings
from router.api.call import principal_of
from router.batches.idle import IdleCapacity
from router.batches.runner import BatchRunner
from router.batches.sqlite_store import SqliteStore
from router.batches.store import BatchStore
from router.openai.answers import TokenBytes
from router.openai.app import Answer, Generate
from router.openai.batches import BatchRoutes
from router.openai.files import FileRoutes, route
from router.openai.line import LineAnswerer
from router.routing.dispatcher import Dispatcher

_AROUND_A_BODY = 4096
"""Bytes of a line beside its body."""


class Batching:
    """start -> stop: nothing is worked on any more -> close: nobody asks any more."""

    def __init__(
        self,
        settings: RouterSettings,
        generate: Generate,
        dispatcher: Dispatcher,
        gate: Gate,
        token_bytes: TokenBytes,
    ) -> None:
        section = settings.router
        self._store = open_batch_store(section.batch_store)
        most_bytes, stalled_client_s = section.max_message_bytes, section.stalled_client_timeout_s
        idle = IdleCapacity(lambda num_running: dispatcher.admission.has_spare(num_running, dispatcher.clock()))
        answerer = LineAnswerer(generate, lambda key_id: principal_of(gate.key_of_id(key_id)), token_bytes, most_bytes)
        counts, most_line_bytes = dispatcher.counters.batch_lines, most_bytes + _AROUND_A_BODY
        self._runner = BatchRunner(self._store, idle, answerer.answer, counts, most_line_bytes=most_line_bytes)
        files = FileRoutes(self._store, gate, most_bytes=section.max_file_bytes, stalled_client_s=stalled_client_s)
        batches = BatchRoutes(self._store, self._runner, gate, stalled_client_s=stalled_client_s)
        self.routes: list[Route] = [*files.routes, *batches.routes]
        self._is_refused = section.batch_store == ""
        if self._is_refused:
            self.routes = [route(each.path, **dict.fromkeys(each.methods or (), _refuse)) for each in self.routes]

    def start(self) -> None:
        if not self._is_refused:
            self._runner.start()

    async def stop(self) -> None:
        await self._runner.stop()

    async def close(self) -> None:
        await self._store.close()


async def _refuse(request: Request, request_id: str) -> Answer:
    raise NotServed(
        "files and batches are not kept here: several machines hold routers, and they share none; ask whoever runs "
        "this cluster to name a Redis in `state`"
    )


def open_batch_store(where: str | None) -> BatchStore:
    """As `RouterSettings.router` has it. Connects, or opens the file, at the first call."""
    if where is not None and where.startswith(("redis://", "rediss://")):
        from router.batches.redis_store import RedisBatchStore

        return RedisBatchStore(where)
    return SqliteStore(where)
