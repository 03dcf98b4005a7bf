"""Prepares a rank whose steps are timed instead of computed (`engine.timed_steps`): no weights, a pool of states."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from engine.cpu_runtime import compute_with
from engine.memory import Activations, available_bytes, plan_memory, resolve_dtype, resolve_kv_dtype
from engine.model_cost import kv_bytes_per_token
from engine.models.folder import read_model
from engine.script import ScriptChooser
from engine.timed_runner import HashChooser, TimedRunner
from kv_transfer.timed_wire import TimedWire
from kv_transfer.transports.selection import make_pool
from worker.group import TokenChooser
from worker.loading import LoadedRank, make_transfer_engine, memory_line, with_transports_of
from worker.resolved import Resolved


def load_timed_rank(resolved: Resolved) -> LoadedRank:
    """Makes the KV pool and the transfer engine of a worker of one rank. Raises ConfigError when the pool does not
    fit, or its script cannot be read, and CheckpointError where a script lacks the tokenizer."""
    compute_with(1)
    demand, timed = resolved.demand, resolved.settings.engine.timed_steps
    nothing = Activations(0, is_measured=True, why="nothing is computed")
    plan = plan_memory(demand, free_bytes=available_bytes(resolved.device), activations=nothing)
    runner = TimedRunner(resolved.config, timed.cost, plan.block_size)
    memory = make_pool(resolved.transports, runner.device, partial(runner.make_pool, plan.num_blocks))
    return LoadedRank(
        runner,
        make_transfer_engine(resolved, runner.kv, plan, memory, _wire_of(resolved)),
        plan,
        with_transports_of(resolved, memory),
        chooser=_chooser_of(resolved),
        choices=(memory_line(plan), f"steps are timed, not computed: {timed.cost}; script: {timed.script}"),
        long_tokens=0,
    )


def _chooser_of(resolved: Resolved) -> TokenChooser:
    model, script = resolved.settings.model, resolved.settings.engine.timed_steps.script
    if script is None:
        return HashChooser(resolved.config.vocab_size)
    return ScriptChooser.from_files(script, Path(model.path), resolved.config)


def _wire_of(resolved: Resolved) -> TimedWire | None:
    """The link of a worker that holds the model's own KV; None: chunks land as they come."""
    settings = resolved.settings
    timed = settings.engine.timed_steps
    if timed.transfer_gb_per_s is None and not timed.transfer_latency_s:
        return None
    model = read_model(settings.model.path, settings.engine.model_impl)
    dtype = resolve_dtype(model, settings.model.dtype, resolved.device)
    kv_dtype = resolve_kv_dtype(settings.engine.kv_cache_dtype, dtype, resolved.device)
    bytes_per_s = None if timed.transfer_gb_per_s is None else timed.transfer_gb_per_s * 1e9
    return TimedWire(
        kv_bytes_per_token(model, 1, kv_dtype) / model.num_hidden_layers, bytes_per_s, timed.transfer_latency_s
    )
