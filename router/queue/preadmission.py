"""The least that a request can be, read off its message before its prompt is: what can be refused for it costs little.

A text prompt counts as one token, and what validation would refuse is cut to what the model allows: it is validation
that says what is wrong with a request. Pure.
"""

from __future__ import annotations

from cluster.pb import generation_pb2 as pb
from router.api.call import Principal
from router.api.served_model import ServedModel
from router.api.validate import MOST_PRIORITY
from router.queue.admission import AdmissionRequest
from router.routing.load_tracker import RequestLoad


def least_of(
    spec: pb.GenerationSpec, model: ServedModel, caller: Principal, time_left_s: float | None
) -> AdmissionRequest:
    num_prompt = min(max(1, len(spec.token_ids.ids)), model.max_model_len)
    num_sequences = min(max(1, spec.sampling.n), model.max_sequences)
    num_output = min(max(1, spec.stopping.max_output_tokens), model.max_model_len - num_prompt)
    scheduling = spec.scheduling
    timeout = scheduling.queue_timeout
    return AdmissionRequest(
        RequestLoad(num_prompt, num_sequences, num_prompt + num_sequences * num_output),
        caller,
        max(-MOST_PRIORITY, min(scheduling.priority, MOST_PRIORITY)),
        timeout.seconds + timeout.nanos / 1e9 if scheduling.HasField("queue_timeout") else None,
        time_left_s,
    )
