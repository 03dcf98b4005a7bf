"""The least that a request can be, read off its message before its prompt is: what can be refused for it costs little.

A text prompt counts as one token, and what validation would refuse is cut to what the model allows: it is validation
that says what is wrong with a request. Pure.
"""

from __future__ import annotations

from cluster.pb import generation_pb2 as pb
from router.admission import Ask
from router.caller import Caller
from router.ledger import Work
from router.model import ServedModel
from router.validate import MOST_PRIORITY


def least_of(spec: pb.GenerationSpec, model: ServedModel, caller: Caller, time_left_s: float | None) -> Ask:
    num_prompt = min(max(1, len(spec.token_ids.ids)), model.max_model_len)
    num_sequences = min(max(1, spec.sampling.n), model.max_sequences)
    num_output = min(max(1, spec.stopping.max_output_tokens), model.max_model_len - num_prompt)
    scheduling = spec.scheduling
    timeout = scheduling.queue_timeout
    return Ask(
        Work(num_prompt, num_sequences, num_prompt + num_sequences * num_output),
        caller,
        max(-MOST_PRIORITY, min(scheduling.priority, MOST_PRIORITY)),
        timeout.seconds + timeout.nanos / 1e9 if scheduling.HasField("queue_timeout") else None,
        time_left_s,
    )
