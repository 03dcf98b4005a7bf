"""`python -m router`: the router in a shell. Its flags are the values of RouterSettings."""

from __future__ import annotations

import importlib
import logging
import sys

from cluster.program import host_in_shell
from cluster.settings import RouterSettings, parse_flags

if __name__ == "__main__":
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    settings = parse_flags(RouterSettings, "python -m router").to_json()
    program = importlib.import_module("router.program")  # --help and wrong flags are answered without it
    sys.exit(host_in_shell(program.create, settings))
