"""The keys that decide how workers run the model, and where: the sections `model`, `placement` and `engine`.

A role may set many of them for its own workers (`cluster.config.roles`); a field marked as `shared` says why no role
may. Knows no role and no other section.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from cluster.config import choices
from cluster.config.overrides import shared
from cluster.config.read import DAY_S, FIXED, bounded
from cluster.config.timed import TimedStepsSection

_AUTO_SEQS_CPU, _AUTO_SEQS_GPU = 64, 256
_GRAMMARS = "routers compile constraints, too, and by one limit"


@dataclass(frozen=True)
class ModelSection:
    """The checkpoint that is served."""

    path: str = field(metadata=shared("both compute the tokens of one request"))
    """Hugging Face folder with config.json, *.safetensors and tokenizer.json, or a .gguf file (docs/formats.md says
    what is read); a relative path starts at the folder of this file. While the cluster runs it may change to one that
    differs in its weights only."""
    name: str | None = field(default=None, metadata=shared("clients know one model"))
    """Name that clients use; null: the folder's name. Clients go on using the one with which the cluster began."""
    dtype: choices.DtypeName = "auto"
    """Type of the weights and of the KV cache while serving; auto: the checkpoint's own."""
    quantization: choices.QuantizationName = "none"
    """What weights are rounded to when they are loaded; int8 takes half of bfloat16's memory, int4 little more than a
    quarter. On a processor with AVX512-VNNI activations are rounded to 8 bits for each product with them, which makes
    them as much faster as they are smaller; a GPU with Triton computes with them as they are; elsewhere they are right
    and slow. fp8 takes half as well and is for GPUs: those that multiply in it (compute capability 8.9 and newer) round
    activations too, older ones with Triton do not. Layers that a checkpoint has in 4 bits stay so with int4, and with
    none on GPUs with Triton and on a processor where dtype is bfloat16 and Baton's own kernels multiply it, as far as a
    rank's share has whole groups of 32 inputs; so does int8 by outputs. Others, and fp8, are decoded first:
    docs/formats.md."""
    max_model_len: int | None = bounded(
        None, at_least=1, at_most=2**24, is_fixed=True, shared_why="a request begins on one and ends on the other"
    )
    """Most tokens of prompt and output together; null: the checkpoint's max_position_embeddings."""
    tool_format: choices.ToolFormatName = field(default="auto", metadata=shared("routers read the calls of both"))
    """How the model writes calls of tools (docs/tools.md); auto: as its chat template shows."""
    chat_template: str | None = field(default=None, metadata=shared("routers render the chats of both"))
    """Jinja file in place of the model's own chat templates (docs/tools.md); a relative path starts at the folder of
    this file. null: the model's own."""


@dataclass(frozen=True)
class PlacementSection:
    """Which of Ray's nodes hold what. The ranks of a worker are on one node anyway."""

    labels: tuple[str, ...] = ()
    """Workers go to nodes with all of these labels, each KEY=VALUE: those of `ray start --labels`, of a node type's
    `labels`, or Ray's own, such as ray.io/accelerator-type=H100; VALUE may be !VALUE or in(ONE,OTHER). []: to any."""
    routers: choices.RouterPlaces = field(default="head", metadata=shared("routers serve both"))
    """head: all where the controller is, where they share their ports; spread: each on a node of its own, all at the
    same ports, and Baton serves once there are nodes for them. Spread ones keep batches only where `state` names a
    Redis."""


@dataclass(frozen=True)
class EngineSection:
    """How each worker runs the model."""

    device: choices.DeviceName = field(default="auto", metadata=FIXED)
    """Where the model runs; auto: CUDA where there is a GPU, else the CPU."""
    block_size: int | Literal["auto"] = bounded("auto", at_least=1, at_most=4096)
    """Tokens of one KV block; auto: 256 on a GPU where flash-attn can run, or flash_attn or varlen is asked for, else
    16. Baton's attention for GPUs reads blocks of any size in place; flash_attn and varlen do so in multiples of 256,
    and gather others first."""
    kv_cache_dtype: choices.KvCacheDtypeName = field(default="auto", metadata=FIXED)
    """What the KV pool holds; auto: the type that is computed in; int8, and on GPUs fp8: rounded, with a scale for each
    head of each token, in little more than half of bfloat16's memory. On a GPU, Baton's own attention (triton) unpacks
    such heads in registers; flash_attn and varlen gather and unpack them first, and do without CUDA graphs."""
    kv_cache_tokens: int | None = bounded(None, at_least=1, at_most=2**40)
    """Tokens that one worker's KV pool holds; null: what is left beside weights and the measured
    activations (GPU), or four requests of max_model_len at most (CPU). `baton config explain` shows the sum."""
    kv_host_bytes: int = bounded(0, at_least=0, at_most=2**50)
    """Host memory of each worker, in bytes, in which it keeps KV that its pool evicts, to load it again where that is
    quicker than to compute it: for conversations that come back after others have had the pool; 0: none. On a GPU it is
    page-locked when the worker starts."""
    kv_disk_bytes: int = bounded(0, at_least=0, at_most=2**60)
    """Room on a disk for each worker, in bytes, in which it keeps KV that its host memory gives up, so that it needs
    `kv_host_bytes`; 0: none. Blocks have checksums, and a worker that starts again with the same weights finds them."""
    kv_disk_path: str | None = None
    """Folder for that on a local disk of every node, relative to the folder of this file; each worker has a file there
    for each of its ranks, which only its owner can read. null: `~/.cache/baton/kv`."""
    kv_store_bytes: int = bounded(0, at_least=0, at_most=2**60)
    """Room of a store that all workers share and that outlives them, in bytes for all of them together, of this cluster
    and others; 0: none. What they write there goes by way of host memory, so that it needs `kv_host_bytes`; what was
    used least recently is deleted."""
    kv_store_path: str | None = None
    """Folder of that store, on a file system that every node has, such as NFS, relative to the folder of this file.
    Files in it can be read by their owner only. Or a URL of storage that fsspec has a file system for, such as
    s3://BUCKET/FOLDER, whose package is to be installed (`pip install s3fs`)."""
    kv_store_policy: choices.KvStorePolicyName = "reused"
    """What a worker writes to the store while it serves: what a second prompt has begun with (reused), what its host
    memory gives up next (evicted), or everything (all). One that is stopped writes what it has, as time allows."""
    kv_key_file: str | None = None
    """File with what KV on a disk and in a store is encrypted with (AES-256-GCM): 32 bytes at least, the same on every
    node and of all workers, readable by its owner only, relative to the folder of this file; null: it is not encrypted.
    What was written with another key is not found. It needs the extra baton[encryption]."""
    kv_session_share: float = bounded(0.5, at_least=0, at_most=0.9)
    """Share of the KV pool, and of host memory and disk below it, in which the KV of sessions is kept while theirs is
    not the only KV that can be given up (`router.session_ttl_s`). Where it is full, the tenant with the most loses its
    least recently used session. 0: sessions are as all others."""
    memory_utilization: float = bounded(0.9, above=0, at_most=1)
    """Share of the memory that is free when a worker starts that its weights, activations and KV pool may take."""
    max_num_batched_tokens: int = bounded(2048, at_least=1, at_most=2**24, is_run_time=True)
    """Most tokens computed in one step; longer prompts are computed in chunks of this. For more than at their start,
    for which they reserved memory, workers are replaced."""
    max_num_seqs: int | Literal["auto"] = bounded("auto", at_least=1, at_most=65_536, is_fixed=True)
    """Most sequences that one worker decodes at a time; auto: 64 on a CPU and 256 on a GPU, where a step of many takes
    little longer than one of few; never more than max_num_batched_tokens."""
    enable_prefix_cache: bool = True
    """Keep the KV of finished prompts and reuse it where a later prompt begins the same."""
    threads: int | None = bounded(None, at_least=1, at_most=1024)
    """CPU threads of one rank; null: the cores divided by the ranks on the machine."""
    attention: choices.AttentionName = "auto"
    """Attention kernel; auto: the fastest in a trial at a worker's start, of flash_attn (where it is installed and
    block_size is auto or a multiple of 256), Baton's own in Triton and torch's varlen those that work and read the KV
    cache in place; else the CPU's."""
    kernels: choices.KernelsName = "auto"
    """Who computes on a CPU; native: Baton's kernels, compiled for the processor at the first start, which needs a C++
    compiler; auto: those where they can be had, else torch. Devices of one worker exchange tensors in shared memory by
    the same kernels, else by Gloo. On a GPU, who computes between products and attention, and who copies pages in a
    hand-off; auto: Baton's kernels in Triton where they can be had."""
    model_impl: choices.ModelImplName = field(default="auto", metadata=shared("both compute tokens of one request"))
    """Whose code computes the model; native: Baton's; transformers: transformers' own, with Baton's attention, paged KV
    and matrix products in it, which needs the extra baton[transformers]; auto: Baton's for the families that it has,
    else transformers' if that is installed. docs/transformers.md says what is served so, and how fast."""
    deterministic: bool = field(default=False, metadata=shared("both compute tokens of one request"))
    """Give each token the same bits whatever else a step holds, and whether it is generated or a part of a prompt, so
    that a request that moves or is replayed goes on with the same tokens where weights, GPU and tensor_parallel are
    alike. Slower; needs Baton's own kernels, and transfer.wire_format native. docs/gpu.md says what it costs."""
    enforce_eager: bool = False
    """Launch each operation of a decode step by itself, instead of replaying CUDA graphs captured at the start: starts
    sooner and takes less GPU memory, decodes slower. No difference on a CPU."""
    async_steps: choices.AsyncStepsName = "auto"
    """Launch the next decode step before the tokens of the one under way are read, which stay on the device: it never
    waits for the host. A sequence that has ended is noticed one step late; tokens are the same. auto: on a GPU, where a
    worker has one; on a CPU it would only compute what is thrown away. With several tensor-parallel ranks rank 0 gives
    the others each step's tokens from device to device."""
    expert_rebalance_tokens: int = bounded(0, at_least=0, at_most=2**40)
    """Tokens after which a worker looks at how many each expert got since the last look, and moves experts between the
    groups of `expert_parallel` where that evens their load out by 5 % or more, a layer between two steps; 0: never.
    The same tokens may then be added up in another order, so that a request's last bits depend on when it ran."""
    grammar_timeout_s: float = bounded(2.0, above=0, at_most=DAY_S, is_fixed=True, shared_why=_GRAMMARS)
    """A constraint on an output that takes more processor time to compile, or five times as long on a busy machine, is
    refused; routers go by it, too."""
    grammar_memory_bytes: int = bounded(
        256 * 1024 * 1024, at_least=2**20, at_most=2**40, is_fixed=True, shared_why=_GRAMMARS
    )
    """Memory for the process that compiles and follows one constraint, beyond what it begins with."""
    timed_steps: TimedStepsSection = field(
        default_factory=TimedStepsSection, metadata=shared("tokens that are computed do not follow tokens that are not")
    )
    """Whether steps are waited for instead of computed."""

    @property
    def num_seqs(self) -> int:
        """`max_num_seqs` as a number; a `device` that is not known yet is taken for a CPU."""
        if self.max_num_seqs != "auto":
            return self.max_num_seqs
        return min(_AUTO_SEQS_GPU if self.device.startswith("cuda") else _AUTO_SEQS_CPU, self.max_num_batched_tokens)
