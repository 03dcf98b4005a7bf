"""The table of docs/plan.md: what `baton plan` says of four models on two devices under three loads, a row a command.

python benchmarks/plan_table.py            # prints the rows
python benchmarks/plan_table.py --write    # puts them into docs/plan.md
"""

from __future__ import annotations

import json
import re
import sys
from itertools import product
from pathlib import Path
from typing import Annotated, Any

if not __package__:
    # Run by its path: this folder, where a module has the name of a package, is not to be imported from.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import typer
from typer.testing import CliRunner

from cli.main import app

PAGE = Path(__file__).resolve().parent.parent / "docs" / "plan.md"
ROW = re.compile(r"^\| `(baton plan [^`]*)` \|.*$", re.M)
_MODELS = ("llama-3.1-8b", "llama-3.1-70b", "qwen3-235b-a22b", "deepseek-v3")
_DEVICES = ("h100", "h200")
_LOADS = ("--prompt 1024 --output 256", "--prompt 8000 --output 200 --ttft-ms 2000", "--prompt 300 --output 1000")
COMMANDS = tuple(
    f"baton plan --model {model} --device {device} --rate 20 {load}"
    for model, device, load in product(_MODELS, _DEVICES, _LOADS)
)


def row_of(command: str) -> str:
    """The row of a command, as Markdown."""
    done = CliRunner().invoke(app, [*command.split()[1:], "--json"])
    if done.exit_code:
        raise RuntimeError(f"{command}: {done.output}")
    told = json.loads(done.stdout)
    split, both = told["disaggregated"], told["colocated"]
    better = split if told["disaggregate"] else both
    cells = [
        f"`{command}`",
        f"{split['devices']}: {_role(split['prefill'])}; {_role(split['decode'])}",
        "none" if both is None else f"{both['devices']}: {_role(both['decode'])}",
        f"**{'apart' if told['disaggregate'] else 'both'}**",
        f"{better['ttft_p90_ms']:.0f} / {better['tpot_p90_ms']:.0f}",
        f"{better['most_rate']:.0f}",
        f"{better['dollars_per_million_output_tokens']:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def _role(role: dict[str, Any]) -> str:
    experts = f" EP {role['expert_parallel']}" if role["expert_parallel"] > 1 else ""
    return f"{role['workers']} × TP {role['tensor_parallel']}{experts}"


def main(write: Annotated[bool, typer.Option("--write", help="Put the rows into docs/plan.md.")] = False) -> None:
    """Print the rows of the table in docs/plan.md."""
    rows = {}
    for command in COMMANDS:
        rows[command] = row_of(command)
        print(rows[command], flush=True)
    if write:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(ROW.sub(lambda found: rows.get(found[1], found[0]), text), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
