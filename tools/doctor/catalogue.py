"""Every check in the order in which it is shown. `python -m tools.doctor.catalogue` prints docs/doctor.md."""

from __future__ import annotations

from cluster.program import ExitCode
from tools.doctor import certificates, configuration, machine, network, probes, running, store
from tools.doctor.findings import Check, Half

_BAD, _UNREACHABLE = ExitCode.BAD_CONFIG, ExitCode.NOT_REACHABLE

CHECKS: tuple[Check, ...] = (
    Check(
        "configuration",
        "cluster.yaml can be read and is valid; every mistake with line and column.",
        configuration.configuration,
        needs_config=False,
        exit_code=_BAD,
    ),
    Check(
        "packages",
        "Python, Baton and the packages that it needs, in the versions that it needs.",
        configuration.packages,
        needs_config=False,
    ),
    Check(
        "programs",
        "Whether a worker and a router could run here: torch and the other libraries can be loaded.",
        configuration.programs,
        needs_config=False,
    ),
    Check(
        "model",
        "The model folder as a worker reads it: config.json, sizes for `tensor_parallel`, headers of all weights.",
        configuration.model,
        exit_code=_BAD,
    ),
    Check(
        "tokenizer",
        "tokenizer.json and the chat template as a router reads them, and whether their ids are the model's.",
        configuration.tokenizer,
        exit_code=_BAD,
    ),
    Check(
        "device",
        "GPUs that torch sees against `engine.device` and the devices of both roles; a driver that torch does not use.",
        machine.device,
    ),
    Check("nccl", "NCCL, where GPUs of several machines or tensor parallelism on GPUs need it.", machine.nccl),
    Check(
        "flash-attn",
        "Whether flash-attn is there and can be imported: one that was built for another torch cannot.",
        machine.flash_attn,
    ),
    Check("attention", "Which attention each role's workers would compute with, and why.", machine.attention),
    Check(
        "kernels",
        "Baton's own kernels on a CPU; compiles them as a worker's start would, if nobody has yet.",
        machine.kernels,
    ),
    Check("transport", "What could carry KV from this machine, by `transfer.transport`.", machine.transport),
    Check(
        "memory",
        "Whether each worker's weights and KV pool fit, as `baton config explain` has them, and all of them together.",
        machine.memory,
    ),
    Check(
        "shared-memory",
        "/dev/shm, which Ray and NCCL use, and memory for the slots of hand-offs.",
        machine.shared_memory,
    ),
    Check(
        "disk",
        "Whether the folders of Ray's files, of logs and of batches can be written and have room.",
        configuration.disk,
    ),
    Check("ports", "Whether the configured ports are free, or taken by the cluster itself.", network.ports),
    Check("clock", "Whether anything keeps this machine's clock in step, where that matters.", network.clock),
    Check("ray", "Ray, its token where `RAY_AUTH_MODE` asks for one, and who can read it.", network.ray),
    Check(
        "redis",
        "Whether the Redis of `state` answers in the time that a router gives it, takes writes, and keeps them.",
        store.redis,
    ),
    Check(
        "keys-file",
        "The API keys: who can read the file, mistakes in it, and whether there are keys of both scopes.",
        configuration.keys_file,
    ),
    Check(
        "certificates",
        "The files of `tls` and `internal_tls`: pairs, names, dates, and that both sides accept one another.",
        certificates.certificates,
    ),
    Check(
        "router",
        "Whether a router answers, takes the API key, and serves.",
        running.router,
        Half.CLUSTER,
        needs_config=False,
        exit_code=_UNREACHABLE,
    ),
    Check(
        "versions",
        "Whether all workers have the same weights, the model folder here has them too, and Baton is the same.",
        running.versions,
        Half.CLUSTER,
        needs_config=False,
    ),
    Check(
        "workers",
        "Whether each worker is ready, how often it was started and why, and whether there are as many as named.",
        running.workers,
        Half.CLUSTER,
        needs_config=False,
    ),
    Check(
        "transports",
        "Whether each prefill worker has a transport in common with each decode worker, and which.",
        running.transports,
        Half.CLUSTER,
        needs_config=False,
    ),
    Check(
        "kv-pools",
        "Room in each worker's KV pool, and slots of pairs that do not close.",
        running.kv_pools,
        Half.CLUSTER,
        needs_config=False,
    ),
    Check(
        "clock-skew",
        "The clocks of the workers and the router against this one, by the `Date` of their metrics pages.",
        running.clock_skew,
        Half.CLUSTER,
        needs_config=False,
    ),
    Check(
        "disaggregation",
        "Sends a long prompt: whether one worker computes it and another one decodes, by `Timing.placement`.",
        probes.disaggregation,
        Half.CLUSTER,
        needs_config=False,
        is_probe=True,
    ),
    Check(
        "bandwidth",
        "Sends long prompts: how fast each pair hands over, by the sender's metrics; a lower bound of the link, as the "
        "prompt is computed meanwhile.",
        probes.bandwidth,
        Half.CLUSTER,
        needs_config=False,
        is_probe=True,
    ),
    Check(
        "journal",
        "Sends a request that may be resumed: whether the router writes it into the Redis of `state`.",
        probes.journal,
        Half.CLUSTER,
        is_probe=True,
    ),
)

_INTRODUCTION = """\
# baton doctor

`baton doctor [FILE]` looks at this machine and its configuration (default: ./cluster.yaml, else Baton's own), and at
the cluster that runs at the configured port or at `--address HOST:PORT`, if one answers. For each finding it says what
to do. Options for a cluster with keys and TLS are those of the other commands.

| result | means |
|---|---|
| ok | as it should be |
| warning | it serves, but not as well or as safely as it could |
| problem | it keeps a cluster from serving as the configuration says |
| skipped | it could not be looked at, or there is nothing to look at; the reason is named |

The exit code is 0 without a problem; 3 where the configuration or the model folder has one; 4 where nobody answers at
`--address`; else 1. With `--json` there is one object:

```text
{version, config, address, result, counts,
 checks: [{name, half, result, seconds, findings: [{result, found, remedy, values}]}]}
```

Keys are added, never changed; `values` holds the numbers behind a finding.

Every check ends within `--limit` seconds (30), whatever hangs; all but those that send requests run at once. Nothing is
left behind: what is sent is cancelled when its time is up, and the KV of probes lies in no prefix cache where another
request would find it. Probes are real requests and count in the metrics. Neither Ray nor a GPU is needed.

This page is made from the code: `python -m tools.doctor.catalogue > docs/doctor.md`.
"""


def render_reference() -> str:
    """docs/doctor.md."""
    parts = [_INTRODUCTION]
    for half in Half:
        parts.append(f"## {half.value[0].upper()}{half.value[1:]}\n\n| check | looks at |\n|---|---|")
        parts.extend(f"| `{check.name}` | {check.about} |" for check in CHECKS if check.half is half)
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    print(render_reference(), end="")
