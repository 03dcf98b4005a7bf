"""`python -m worker`: one rank of one worker, without Ray. Its flags are the fields of `WorkerSettings`."""

from __future__ import annotations

import sys

from cluster.flags import parse_flags
from cluster.program import host_in_shell
from cluster.settings import WorkerSettings
from worker.program import create

if __name__ == "__main__":
    sys.exit(host_in_shell(create, parse_flags(WorkerSettings, "python -m worker").to_json()))
