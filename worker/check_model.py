"""`python -m worker.check_model FOLDER MODEL_IMPL [NEEDS]`: refuses a model folder that workers could not serve, before
any is started. NEEDS is `weights`, the default, or `config` for steps that are timed, which need no weights. Reads no
weights, and loads neither torch nor transformers.

Ends with an error and an exit code as `cluster.program` has them. Where what reads models is not installed, as on a
machine that only starts a cluster, it finds nothing wrong: the workers look for themselves.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from cluster.errors import CheckpointError, ConfigError
from cluster.program import ExitCode


def main(folder: str, model_impl: str, needs: str = "weights") -> int:
    try:
        tensors = importlib.import_module("engine.models.tensors")
        tensors.check_folder(Path(folder), model_impl, needs_weights=needs == "weights")
    except ModuleNotFoundError:
        return ExitCode.DONE
    except (CheckpointError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.BAD_CONFIG
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
