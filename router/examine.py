"""`python -m router.examine FOLDER [CHAT_TEMPLATE]`: what a router would make of a model folder, and of a file in place
of its chat templates; for `baton serve` and `baton doctor`.

Writes one JSON object to stdout, `{"found": ...}` or, where a router would refuse the folder, `{"refused": "why"}`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from cluster.errors import BatonError
from router.api.served_model import ServedModel
from router.api.tokenizer import Tokenizer


def examine(folder: Path, chat_template: str | None = None) -> dict[str, Any]:
    try:
        model = ServedModel.from_folder(folder, name="", max_model_len=None, max_num_seqs=1)
        tokenizer = Tokenizer.from_folder(folder, chat_template)
    except BatonError as error:
        return {"refused": error.message}
    return {
        "found": {
            "vocab_size": model.vocab_size,
            "num_tokens": tokenizer.num_tokens,
            "max_model_len": model.max_model_len,
            "has_chat_template": tokenizer.chat_template.is_present,
        }
    }


def main() -> int:
    print(json.dumps(examine(Path(sys.argv[1]), *sys.argv[2:])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
