"""What one process is told at its start: flat, frozen, JSON in and out.

`cluster.config` holds what an operator writes; the controller resolves it into these, one for each process, so that a
process never reads cluster.yaml. The flags of `python -m worker` and `python -m router` are these fields.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Self


class JsonSettings:
    """JSON round trip for the frozen dataclasses below; an unknown key is a TypeError that names it."""

    @classmethod
    def from_json(cls, text: str) -> Self:
        values = json.loads(text)
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})

    def to_json(self) -> str:
        return json.dumps(self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        assert dataclasses.is_dataclass(self)
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class WorkerSettings(JsonSettings):
    """One tensor-parallel rank of one worker."""

    worker_id: str
    """Name of the worker, the same on each of its ranks, such as `prefill-0`."""
    role: str
    """`prefill` or `decode`: the kind of new work the router sends here."""
    model_path: str
    """Hugging Face folder with config.json, *.safetensors, tokenizer.json."""
    model_name: str = ""
    """Name that clients use; empty: the folder's name."""
    dtype: str = "auto"
    """`auto` (the checkpoint's), `float32`, `bfloat16` or `float16`."""
    quantization: str = "none"
    """`none`, `int8`, `int4` or `fp8`: what weights are rounded to when they are loaded."""
    max_model_len: int | None = None
    """Most tokens of prompt and output together; None: the checkpoint's max_position_embeddings."""
    device: str = "auto"
    """`auto`, `cpu` or `cuda`."""
    tp_rank: int = 0
    tp_size: int = 1
    leader: str | None = None
    """host:port of rank 0's rank server; None on rank 0 itself."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """gRPC port of rank 0; 0: any free one."""
    rank_port: int = 0
    """Port at which rank 0 awaits the other ranks; 0: any free one."""
    node: str = ""
    """Name of the machine, for status; empty: the host name."""
    block_size: int = 16
    """Tokens of one KV block."""
    kv_cache_dtype: str = "auto"
    """`auto` (what is computed in), `int8` or, on GPUs, `fp8`: what the KV pool holds."""
    kv_cache_tokens: int | None = None
    """Tokens the KV pool holds; None: what is left (GPU), or 4 requests of max_model_len at most (CPU)."""
    memory_utilization: float = 0.9
    """Share of the memory that is free at the start that weights, activations and KV pool may take together."""
    max_num_batched_tokens: int = 2048
    """Most tokens computed in one step."""
    max_num_seqs: int = 64
    """Most sequences decoded in one step."""
    tpot_slo_s: float = 0.05
    """A step in which sequences decode computes no more of prompts than ends within this time."""
    enable_prefix_cache: bool = True
    threads: int | None = None
    """CPU threads of torch for this rank; None: cores divided by the ranks on this machine."""
    attention: str = "auto"
    """`auto`, `flash_attn`, `varlen` or `cpu`."""
    kernels: str = "auto"
    """`auto`, `native` or `torch`: who computes on a CPU."""
    enforce_eager: bool = False
    """Capture no CUDA graphs."""
    transport: str = "auto"
    """`auto`, `shm`, `gloo`, `cuda_ipc` or `nccl`; auto picks for each pair and says why."""
    wire_format: str = "native"
    """`native` (the sender's dtype), `int8` or `fp8`: what KV is turned into on its way."""
    digest: str = "auto"
    """`on`: each slot carries a digest that is checked on landing; `sampled`: every 16th; `off`; auto: on for CPU
    memory, sampled for GPU memory."""
    chunk_tokens: int = 256
    """Most tokens of one hand-off chunk, that is, of one slot."""
    num_slots: int = 4
    """Slots of each pair: chunks in flight between two workers."""
    max_pairs: int = 16
    """Pairs of workers held open; one more closes the least recently used that is idle."""
    transfer_timeout_s: float = 5.0
    """A chunk that makes no progress for so long fails its request and retires the pair."""
    heartbeat_s: float = 0.5
    """Two workers of a pair, and a worker and a router, hear of one another at least so often."""
    suspect_after_s: float = 1.5
    """A peer silent for so long gets nothing new."""
    dead_after_s: float = 3.0
    """A peer silent for so long is given up: its pair is retired."""
    transfer_faults: float = 0.0
    """For tests: the share of transfers that fail on purpose, in ways that are drawn at random."""
    metrics_port: int | None = None
    """Port of the Prometheus page; 0: any free one; None: no page."""
    peak_tflops: float | None = None
    """What one device computes at most, for MFU; None: from a table of GPUs, or measured on a CPU."""
    peak_gb_per_s: float | None = None
    """What its memory moves at most, for MBU; None: in the same way."""
    step_log: str | None = None
    """File that gets one JSON line for each step: who joined, ran and left."""
    internal_tls_cert: str | None = None
    """File with the certificate that this process shows to others of the cluster; None: without TLS."""
    internal_tls_key: str | None = None
    """File with its private key."""
    internal_tls_ca: str | None = None
    """File with the authority that signed the certificates of all of them."""
    insecure: bool = False
    """Allow an address other than loopback without TLS."""


@dataclass(frozen=True)
class RouterSettings(JsonSettings):
    """One router process."""

    model_path: str
    """Folder whose tokenizer, chat template and generation_config.json the router reads; never weights."""
    model_name: str = ""
    """Name that clients use; empty: the folder's name."""
    host: str = "127.0.0.1"
    port: int = 50051
    """Public gRPC port; 0: any free one."""
    http_port: int | None = None
    """Port of the OpenAI API over HTTP; 0: any free one; None: none."""
    keys_file: str | None = None
    """File of API keys; None: clients need none."""
    batch_store: str | None = None
    """Where files and batches are kept: redis:// or rediss:// URL, or a file of SQLite, ~ being the home directory;
    None: in memory, until the router ends; empty: nowhere, and they are refused."""
    max_file_bytes: int = 100 * 1024 * 1024
    """Largest file that may be uploaded for a batch."""
    node_host: str = ""
    """Address of this machine for the controller and whoever reads metrics; empty: they are on this machine."""
    control_port: int = 0
    """Port on which the controller names the workers, at `node_host`, else on loopback; 0: any free one."""
    workers: tuple[str, ...] = ()
    """Workers known at the start, as `prefill:ID=HOST:PORT` or `decode:ID=HOST:PORT`."""
    needs_prefill: bool = True
    """Waits for a prefill worker before it serves; False: decode workers compute prompts while there is none."""
    max_model_len: int | None = None
    max_num_seqs: int = 64
    """Most sequences of one request a decode worker can hold; bounds `n`."""
    policy: str = "predicted"
    """`predicted`, `least_loaded`, `round_robin` or `random`: how the workers of a request are chosen."""
    ttft_slo_s: float = 0.5
    """Time to first token that requests should keep."""
    tpot_slo_s: float = 0.05
    """Time per output token, after the first, that they should keep."""
    max_running_requests: int = 256
    """Requests handed to workers at one time."""
    max_queued_requests: int = 1024
    """Requests waiting beside those; one more is refused."""
    max_running_tokens: int | None = None
    """Prompts and most outputs of all that runs; None: what the decode workers' KV pools should hold."""
    max_queued_tokens: int = 2**20
    """Prompts and most outputs of all that waits."""
    queue_timeout_s: float = 60.0
    """A request that waited this long for a worker is refused, unless the client set its own."""
    max_queue_wait_s: float | None = None
    """In an overload, a request that would wait longer is refused at once; None: `ttft_slo_s`."""
    stalled_client_timeout_s: float = 20.0
    """A client that takes no message for so long is dropped."""
    max_message_bytes: int = 4 * 1024 * 1024
    """Largest gRPC message accepted."""
    stream_messages_per_s: float | None = None
    """Messages of all streams together; None: by the cores."""
    dead_after_s: float = 3.0
    """A worker whose session is silent for so long is taken as lost."""
    drain_timeout_s: float = 5.0
    """At shutdown, running requests get this long to end."""
    metrics_port: int | None = None
    """Port of the Prometheus page; 0: any free one; None: no page."""
    trace_endpoint: str | None = None
    """URL of an OpenTelemetry collector that takes OTLP over HTTP; None: nothing is traced."""
    trace_sample: float = 1.0
    """Share of the calls without a traceparent that is traced."""
    tls_cert: str | None = None
    """File with the certificate of the public port; None: without TLS."""
    tls_key: str | None = None
    """File with its private key."""
    tls_client_ca: str | None = None
    """File with the authorities of clients, who must show a certificate; None: they need none."""
    internal_tls_cert: str | None = None
    """File with the certificate that this process shows to workers and the controller; None: without TLS."""
    internal_tls_key: str | None = None
    """File with its private key."""
    internal_tls_ca: str | None = None
    """File with the authority that signed the certificates of all of them."""
    state: str | None = None
    """redis:// or rediss:// URL of the store in which generations outlive a router; None: they end with it."""
    resume_window_s: float = 30.0
    """A generation that may be resumed is kept so long after its client has left, or, later, after its end."""
    insecure: bool = False
    """Allow an address other than loopback without TLS."""
