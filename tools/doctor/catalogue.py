"""Every check in the order in which it is shown. `python -m tools.doctor.catalogue` prints docs/doctor.md."""

from __future__ import annotations

import importlib

from tools.doctor.check import Check, Half

FILES = ("configuration", "machine", "network", "certificates", "running", "probes")
"""Files of checks. To add a check, write its function in one of them."""

CHECKS: tuple[Check, ...] = tuple(
    found
    for name in FILES
    for found in vars(importlib.import_module(f"tools.doctor.{name}")).values()
    if isinstance(found, Check)
)
"""In the order of their files, and in each in the order in which they are written."""

_INTRODUCTION = """\
# baton doctor

`baton doctor [FILE]` checks this machine and its configuration (default: ./cluster.yaml, else Baton's own), and the
cluster that runs at the configured port or at `--address HOST:PORT`, if one answers. For each finding it says what to
do. Options for a cluster with keys and TLS are those of the other commands.

| result | means |
|---|---|
| ok | as it should be |
| warning | it works, but not as well or as safely as it could |
| problem | it keeps a cluster from serving as the configuration says |
| skipped | it could not be checked, or there is nothing to check; the reason is named |

The exit code is 0 without a problem; 3 where the configuration or the model folder has one; 4 where nobody answers at
`--address`; else 1. With `--json` there is one object:

```text
{version, config, address, result, counts,
 checks: [{name, half, result, seconds, findings: [{result, found, remedy, values}]}]}
```

Keys are added, never changed; `values` holds the numbers behind a finding.

Every check ends within `--limit` seconds (30), whatever hangs; all but those that send requests run at once. Nothing is
left behind: a request whose time is up is cancelled, and the KV of probes lies in no prefix cache where another request
would find it. Probes are real requests and count in the metrics. Neither Ray nor a GPU is needed.

This page is made from the code: `python -m tools.doctor.catalogue > docs/doctor.md`.
"""


def render_reference() -> str:
    """The text of docs/doctor.md."""
    parts = [_INTRODUCTION]
    for half in Half:
        parts.append(f"## {half.value[0].upper()}{half.value[1:]}\n\n| check | looks at |\n|---|---|")
        parts.extend(f"| `{check.name}` | {check.about} |" for check in CHECKS if check.half is half)
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    print(render_reference(), end="")
