"""The files on the disk of a worker that lives, and what becomes of those of the one that it replaces.

A worker that begins beside the one whose place it takes finds nothing on its disk, as that one still has its files. It
looks for files that a worker of its role has left, takes them over in place of its own, and deletes those.
"""

from __future__ import annotations

import logging
import queue
import threading

from kv_transfer.disk_slots import DiskFolder
from kv_transfer.tier_copies import TierCopies
from worker.core import Core
from worker.tier_moves import TierMoves

logger = logging.getLogger(__name__)

PUT_BY_S = 3.0
"""The most that a worker which ends takes to copy what is cached to its disk."""
_LOOK_EVERY_S = 0.5


class DiskFiles:
    """What rank 0 has claimed. `moves` is used on the engine thread of `core`."""

    def __init__(self, folder: DiskFolder, core: Core, moves: TierMoves, copies: TierCopies) -> None:
        self._folder, self._core, self._moves, self._copies = folder, core, moves, copies
        self._is_closing = threading.Event()
        if folder.is_new:
            threading.Thread(target=self._follow, name="disk", daemon=True).start()

    def close(self, engine: threading.Thread | None) -> None:
        """Leaves the files for good when the engine thread has put by what there is; None: it has failed, and the
        worker may come back for them."""
        self._is_closing.set()
        if engine is not None:
            engine.join(PUT_BY_S + 1.0)
            self._folder.leave()

    def _follow(self) -> None:
        """Until there is something to take over."""
        told = queue.SimpleQueue[str]()
        try:
            while (left := self._folder.left_behind()) is None:
                if self._is_closing.wait(_LOOK_EVERY_S):
                    return
            self._core.inbox.post(self._moves.take_over, left.number, lambda: self._copies.found, told.put)
            if error := told.get():  # some ranks may have them: both stay claimed
                logger.warning("the KV that another worker has left on the disk is not taken over: %s", error)
                return
            self._folder, mine = left, self._folder
            mine.remove()
        except OSError as error:
            logger.warning("no KV that another worker has left on the disk is taken over: %s", error)
