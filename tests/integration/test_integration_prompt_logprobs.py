"""The logprobs of prompts against transformers: through the whole cluster, and from workers of every kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from checkpoints import VOCAB_SIZE, make_checkpoint
from cluster_fixture import PlainCluster, Stream, token_spec
from workers import Worker, hand_off, running, sampling

from cluster.lifecycle import RequestKey
from cluster.pb import generation_pb2 as pb
from cluster.pb import worker_pb2

CHUNK = 48
NUM_TOP = 3
LENGTHS = (1, 2, 16, CHUNK, CHUNK + 1, 150)
"""Up to CHUNK tokens are computed in one step, more in several."""


class Transformers:
    """The reference implementation, in float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    @torch.inference_mode()
    def check(self, told: Sequence[pb.TokenLogprob], prompt: Sequence[int]) -> None:
        logprobs = self._model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        assert [entry.token_id for entry in told] == list(prompt)
        assert told[0] == pb.TokenLogprob(token_id=prompt[0], undefined=True)
        for before, entry in zip(logprobs, told[1:], strict=False):
            own = before[entry.token_id]
            assert not entry.undefined
            assert entry.logprob == pytest.approx(float(own), abs=1e-4)
            best = before.topk(NUM_TOP)
            assert [t.logprob for t in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
            assert [float(before[t.token_id]) for t in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
            # as many are likelier, give or take those that are as likely in float32
            assert int((before > own + 1e-4).sum()) < entry.rank <= int((before > own - 1e-4).sum()) + 1


def make_prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(100 * length + seed)
    return torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Transformers:
    return Transformers(folder)


@pytest.fixture(scope="module")
def cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainCluster]:
    logs = tmp_path_factory.mktemp("cluster")
    with PlainCluster(folder, logs, kv_cache_tokens=4096, max_num_batched_tokens=CHUNK) as cluster:
        yield cluster


@pytest.mark.timeout(300)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("n", "most"), [(1, 1), (1, 5), (3, 1), (3, 5)])
def test_a_stream_starts_with_the_logprobs_of_transformers(
    length: int, n: int, most: int, cluster: PlainCluster, reference: Transformers
) -> None:
    prompt = make_prompt(length)
    stream = Stream(cluster, token_spec(prompt, most, n=n, prompt_logprobs=NUM_TOP))
    (started,) = [event.started for event in stream.result() if event.HasField("started")]
    reference.check(started.prompt_logprobs, prompt)
    plain = Stream(cluster, token_spec(prompt, most, n=n))
    plain.result()
    for index in range(n):
        assert stream.token_ids(index) == plain.token_ids(index) and len(plain.token_ids(index)) == most


@pytest.mark.timeout(300)
def test_many_at_once_get_their_own_beside_others_that_decode(cluster: PlainCluster, reference: Transformers) -> None:
    prompts = {length: make_prompt(length, seed=1) for length in LENGTHS}
    others = [Stream(cluster, token_spec(make_prompt(30, seed=i), 60)) for i in range(4)]
    streams = {x: Stream(cluster, token_spec(prompt, 8, prompt_logprobs=NUM_TOP)) for x, prompt in prompts.items()}
    for length, stream in streams.items():
        (started,) = [event.started for event in stream.result() if event.HasField("started")]
        reference.check(started.prompt_logprobs, prompts[length])
    for other in others:
        assert not any(event.started.prompt_logprobs for event in other.result())


@pytest.mark.timeout(300)
def test_a_cached_prompt_is_computed_anew_for_who_asks(cluster: PlainCluster, reference: Transformers) -> None:
    prompt = make_prompt(150, seed=2)
    cached = []
    for wanted in (None, NUM_TOP, None):
        stream = Stream(cluster, token_spec(prompt, 4, prompt_logprobs=wanted))
        events = stream.result()
        cached.append(events[-1].completed.usage.cached_tokens)
        if wanted is not None:
            (started,) = [event.started for event in events if event.HasField("started")]
            reference.check(started.prompt_logprobs, prompt)
    assert cached == [0, 0, 144]


@pytest.fixture(scope="module")
def fleet(folder: Path) -> Iterator[dict[str, Worker]]:
    """Tensor-parallel prefill workers, one that computes in chunks and one that does not, and decode workers."""
    sizes = {
        "prefill-chunks": (2, CHUNK),
        "prefill-whole": (2, 512),
        "decode-one": (1, CHUNK),
        "decode-two": (2, CHUNK),
    }
    workers = {
        name: Worker(
            worker_id=name,
            role=name.split("-")[0],
            model_path=str(folder),
            tp_size=tp_size,
            kv_cache_tokens=2048,
            max_num_batched_tokens=budget,
            max_num_seqs=8,
        )
        for name, (tp_size, budget) in sizes.items()
    }
    with running(*workers.values()):
        yield workers


@pytest.mark.timeout(300)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ["prefill-chunks", "prefill-whole"])
def test_a_tensor_parallel_prefill_worker_tells_them(
    name: str, length: int, n: int, fleet: dict[str, Worker], reference: Transformers
) -> None:
    prefill, decode, prompt = fleet[name], fleet["decode-one"], make_prompt(length)
    how = sampling(max_output_tokens=3, n=n)
    key = hand_off(f"{name} {length} {n}", prompt, prefill, decode, how, prompt_logprobs=NUM_TOP)
    decode.wait_for(lambda: len(decode.outputs[key].finished) == n)
    assert not decode.outputs[key].prompt_logprobs, "they are the prefill worker's to tell"
    prefill.wait_for(lambda: len(prefill.outputs[key].tokens) == n)
    reference.check(prefill.outputs[key].prompt_logprobs, prompt)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ["decode-one", "decode-two"])
def test_a_decode_worker_that_computes_the_prompt_itself_tells_them(
    name: str, length: int, n: int, fleet: dict[str, Worker], reference: Transformers
) -> None:
    worker, prompt = fleet[name], make_prompt(length)
    key = RequestKey(f"local {length} {n}", 1)
    admit = worker_pb2.Admit(
        key=key.to_proto(),
        role=worker_pb2.ROLE_DECODE,
        prompt_token_ids=prompt,
        sampling=sampling(max_output_tokens=3, n=n),
        prompt_logprobs=NUM_TOP,
    )
    worker.send(admit=admit)
    worker.wait_for(lambda: len(worker.outputs[key].finished) == n)
    reference.check(worker.outputs[key].prompt_logprobs, prompt)
