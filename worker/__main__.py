"""`python -m worker`: one rank of one worker, without Ray. Its flags are the values of `WorkerSettings`."""

from __future__ import annotations

import logging
import os
import sys

from cluster.program import host_in_shell, import_behind
from cluster.settings import WorkerSettings, parse_flags

if __name__ == "__main__":
    settings = parse_flags(WorkerSettings, "python -m worker").to_json()
    code = host_in_shell(import_behind("worker.program").create, settings)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread may still wait in a rendezvous with a peer that is gone: unwinding it would abort
