"""`baton serve` as it stands in a page, until it serves: shows what it printed, presses Ctrl-C, and exits as it did.

Without a --port of its own it takes any free ones.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from serve_process import Serve


def main() -> int:
    arguments = sys.argv[2:]
    if "--port" not in arguments:
        arguments += ["--port", "0"]
    serving = Serve(*arguments, program=(".venv/bin/baton",), cwd=Path.cwd())
    try:
        serving.until("ready after")
        code = serving.press_ctrl_c()
        print(serving.output, end="")
        return code
    finally:
        serving.close()


if __name__ == "__main__":
    sys.exit(main())
