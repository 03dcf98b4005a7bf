"""Blocking Python clients over gRPC, of a router and of the controller.

Errors of the server are raised as the exceptions of `cluster.errors`; NotReachable says that nobody answers. One client
serves many threads. A call is made once; only `resuming_stream` calls again when its stream breaks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.address import DEFAULT_ADDRESS, DEFAULT_ADMIN_ADDRESS
from cluster.errors import DeadlineExceeded, InvalidRequest, NotReachable, Unavailable
from cluster.kv_groups import LOOK_TIMEOUT_S
from cluster.pb import admin_pb2, admin_pb2_grpc, generation_pb2_grpc
from cluster.pb import generation_pb2 as pb
from cluster.protocol import check_protocol, inside_metadata
from cluster.rpc import create_blocking_channel, from_rpc_error
from cluster.tls import ClientTls
from cluster.token import find_token
from tools.generation_stream import ResumingStream

_ENDS = (admin_pb2.ClusterEvent.KIND_CHANGED, admin_pb2.ClusterEvent.KIND_FAILED)

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or chat messages such as `{"role": "user", "content": "..."}`."""

_MODES = {
    "auto": pb.ToolChoice.MODE_AUTO,
    "none": pb.ToolChoice.MODE_NONE,
    "required": pb.ToolChoice.MODE_REQUIRED,
}


def make_spec(
    prompt: Prompt,
    *,
    model: str = "",
    max_output_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    n: int | None = None,
    stop: Sequence[str] = (),
    ignore_eos: bool = False,
    top_logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    token_ids: bool = False,
    include_timing: bool = False,
    request_id: str = "",
    tools: Sequence[Message] = (),
    tool_choice: str = "auto",
    suffix: str = "",
) -> pb.GenerationSpec:
    """None leaves a field to the server. `tools`: functions that an answer to messages may call, as OpenAI's API has
    them; `tool_choice`: auto, none, required, or the name of the one to call. `suffix`: text behind what is generated,
    for models that fill in the middle. Raises InvalidRequest for a value that no message can carry."""
    try:
        spec = pb.GenerationSpec(
            model=model,
            sampling=pb.SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, n=n),
            stopping=pb.StoppingCriteria(max_output_tokens=max_output_tokens, stop=stop, ignore_eos=ignore_eos),
            output=pb.OutputOptions(
                token_ids=token_ids,
                top_logprobs=top_logprobs,
                prompt_logprobs=prompt_logprobs,
                include_timing=include_timing,
            ),
            request_id=request_id,
            suffix=suffix,
        )
        if tools:
            spec.chat.json = json.dumps({"messages": prompt, "tools": list(tools)})
            mode = _MODES.get(tool_choice, pb.ToolChoice.MODE_REQUIRED)
            names = () if tool_choice in _MODES else (tool_choice,)
            spec.chat.tool_choice.CopyFrom(pb.ToolChoice(mode=mode, names=names))
        else:
            _set_prompt(spec, prompt)
    except UnicodeError as error:
        raise InvalidRequest("the prompt or a stop string is not valid Unicode text") from error
    except ValueError as error:
        raise InvalidRequest(f"a number does not fit its field: {error}") from error
    return spec


def _set_prompt(spec: pb.GenerationSpec, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        spec.text = prompt
    elif prompt and isinstance(prompt[0], Mapping):
        for message in cast(Sequence[Message], prompt):
            spec.chat.messages.add().update(message)
    else:
        spec.token_ids.SetInParent()
        spec.token_ids.ids.extend(cast(Sequence[int], prompt))


def key_metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """The gRPC metadata of each call. Raises InvalidRequest for a key that no header can carry."""
    if api_key is None:
        return ()
    if not (api_key.isascii() and api_key.isprintable()):
        raise InvalidRequest("the API key holds characters that no key has; was it copied whole?")
    return (("authorization", f"Bearer {api_key}"),)


class GenerationStream:
    """Iterates over the events of one call. As a context manager, it cancels what has not ended."""

    def __init__(self, call: Any, address: str, channel: grpc.Channel | None = None) -> None:
        """`channel`: closed with the stream; None: the call uses a shared one."""
        self._call = call
        self._address = address
        self._channel = channel
        self._has_begun = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> pb.GenerateStreamResponse:
        with as_baton_errors(self._address, has_begun=self._has_begun):
            event: pb.GenerateStreamResponse = next(self._call)
        self._has_begun = True
        return event

    def cancel(self) -> None:
        """Ends the generation at the server. May be called from any thread, and after the end."""
        self._call.cancel()
        if self._channel is not None:
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


class ClientConnection:
    """A channel to one server, which connects at the first call."""

    def __init__(
        self, address: str, *, api_key: str | None = None, tls: ClientTls | None = None, call_s: float = 30.0
    ) -> None:
        """`api_key` is sent with each call. `call_s` limits a call that has no limit of its own. Raises InvalidRequest
        for a key that no header can carry, and ConfigError for files of `tls` that cannot be used."""
        self.address = address
        self._tls = tls
        self._call_s = call_s
        self._metadata = key_metadata(api_key)
        self._channel = create_blocking_channel(address, tls=tls)

    def close(self) -> None:
        """Cancels running calls."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, method: Any, request: Any, more_s: float = 0.0) -> Any:
        with as_baton_errors(self.address):
            return method(request, timeout=self._call_s + more_s, metadata=self._metadata)


class BatonClient(ClientConnection):
    """Client of a router. `timeout_s` of a call is its gRPC deadline."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        api_key: str | None = None,
        tls: ClientTls | None = None,
        call_s: float = 30.0,
    ) -> None:
        super().__init__(address, api_key=api_key, tls=tls, call_s=call_s)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._generation = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._admin = admin_pb2_grpc.StatusServiceStub(self._channel)

    def stream(self, spec: pb.GenerationSpec, *, timeout_s: float | None = None) -> GenerationStream:
        """Streams one generation. Iterating raises the errors, NotReachable included."""
        request = pb.GenerateStreamRequest(spec=spec)
        call = self._generation.GenerateStream(request, timeout=timeout_s, metadata=self._metadata)
        return GenerationStream(call, self.address)

    def resuming_stream(self, spec: pb.GenerationSpec, *, timeout_s: float | None = None) -> ResumingStream:
        """Streams one generation, and goes on where it was when the connection or the router is lost."""
        return ResumingStream(self._open, self.cancel, spec, timeout_s=timeout_s)

    def _open(self, spec: pb.GenerationSpec, timeout_s: float | None, is_again: bool) -> GenerationStream:
        """A stream that is opened again gets a connection of its own: the shared one waits after each failure to
        connect, and may notice late that the router is back."""
        if not is_again:
            return self.stream(spec, timeout_s=timeout_s)
        channel = create_blocking_channel(self.address, tls=self._tls, is_alone=True)
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        request = pb.GenerateStreamRequest(spec=spec)
        call = stub.GenerateStream(request, timeout=timeout_s, metadata=self._metadata)
        return GenerationStream(call, self.address, channel)

    def generate(self, spec: pb.GenerationSpec, *, timeout_s: float | None = None) -> pb.GenerateResponse:
        request = pb.GenerateRequest(spec=spec)
        with as_baton_errors(self.address):
            response: pb.GenerateResponse = self._generation.Generate(
                request, timeout=timeout_s, metadata=self._metadata
            )
        return response

    def cancel(self, *generation_ids: str) -> pb.CancelGenerationResponse:
        request = pb.CancelGenerationRequest(generation_ids=generation_ids)
        response: pb.CancelGenerationResponse = self._call(self._generation.CancelGeneration, request)
        return response

    def tokenize(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        request = pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        return list(self._call(self._generation.Tokenize, request).token_ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        text: str = self._call(self._generation.Detokenize, pb.DetokenizeRequest(token_ids=token_ids)).text
        return text

    def models(self) -> list[pb.Model]:
        return list(self._call(self._generation.ListModels, pb.ListModelsRequest()).models)

    def status(self) -> admin_pb2.GetStatusResponse:
        """Raises IncompatibleProtocol for a router that this program would misunderstand."""
        response: admin_pb2.GetStatusResponse = self._call(self._admin.GetStatus, admin_pb2.GetStatusRequest())
        check_protocol(f"the router at {self.address}", response.protocol, "this program")
        return response

    def activity(self, since: admin_pb2.GetActivityRequest | None = None) -> admin_pb2.GetActivityResponse:
        """Results of this router's requests in the last minutes; None: all that it keeps."""
        request = admin_pb2.GetActivityRequest() if since is None else since
        response: admin_pb2.GetActivityResponse = self._call(self._admin.GetActivity, request)
        return response

    def cache(self, num_prefixes: int) -> admin_pb2.GetCacheResponse:
        """How much of this router's prompts was cached, and so many of the prefixes that they share."""
        request = admin_pb2.GetCacheRequest(num_prefixes=num_prefixes)
        response: admin_pb2.GetCacheResponse = self._call(self._admin.GetCache, request)
        return response

    def health(self) -> str:
        """SERVING or NOT_SERVING."""
        answer = self._call(self._health.Check, health_pb2.HealthCheckRequest())
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


class AdminClient(ClientConnection):
    """Client of the controller's AdminService, which it shows the token of the cluster, if this user has it.
    `expected_version` 0: whichever is current."""

    def __init__(
        self,
        address: str = DEFAULT_ADMIN_ADDRESS,
        *,
        api_key: str | None = None,
        tls: ClientTls | None = None,
        call_s: float = 30.0,
    ) -> None:
        super().__init__(address, api_key=api_key, tls=tls, call_s=call_s)
        self._metadata = (*self._metadata, *inside_metadata(find_token(address)))
        self._admin: Any = admin_pb2_grpc.AdminServiceStub(self._channel)
        self._workers: Any = admin_pb2_grpc.WorkerControlServiceStub(self._channel)

    def cluster(self) -> admin_pb2.GetClusterResponse:
        """Raises IncompatibleProtocol for a controller that this program would misunderstand."""
        response: admin_pb2.GetClusterResponse = self._call(self._admin.GetCluster, admin_pb2.GetClusterRequest())
        check_protocol(f"the controller at {self.address}", response.protocol, "this program")
        return response

    def set_roles(
        self, prefill: int, decode: int, *, expected_version: int = 0, dry_run: bool = False
    ) -> admin_pb2.ChangeResponse:
        """Sets the number of workers of each role."""
        request = admin_pb2.SetRolesRequest(
            num_prefill=prefill, num_decode=decode, expected_version=expected_version, dry_run=dry_run
        )
        return self._change(self._admin.SetRoles, request)

    def apply(
        self, text: str, *, filename: str = "", expected_version: int = 0, dry_run: bool = False
    ) -> admin_pb2.ChangeResponse:
        """Applies the text of a cluster.yaml."""
        request = admin_pb2.ApplyRequest(
            yaml=text, filename=filename, expected_version=expected_version, dry_run=dry_run
        )
        return self._change(self._admin.Apply, request)

    def drain(self, worker_id: str, *, expected_version: int = 0, dry_run: bool = False) -> admin_pb2.ChangeResponse:
        """Takes a worker out."""
        request = admin_pb2.DrainWorkerRequest(worker_id=worker_id, expected_version=expected_version, dry_run=dry_run)
        return self._change(self._admin.DrainWorker, request)

    def flush_cache(self, worker_id: str) -> admin_pb2.FlushPrefixCacheResponse:
        """Empties a worker's prefix cache, its disk and what the store has of it, whose objects all are looked at."""
        request = admin_pb2.FlushPrefixCacheRequest(worker_id=worker_id)
        response: admin_pb2.FlushPrefixCacheResponse
        response = self._call(self._workers.FlushPrefixCache, request, LOOK_TIMEOUT_S)
        return response

    def on_worker(self, method: str, request: Any) -> Any:
        """Calls a method of the WorkerControlService on the worker that the request names; returns its answer."""
        return self._call(getattr(self._workers, method), request)

    def events(
        self, after_sequence: int | None = None, *, timeout_s: float | None = None
    ) -> Iterator[admin_pb2.ClusterEvent]:
        """Events after that one (None: from now on), without end or until `timeout_s` has passed."""
        request = admin_pb2.WatchEventsRequest(after_sequence=after_sequence)
        try:
            with as_baton_errors(self.address):
                yield from self._admin.WatchEvents(request, timeout=timeout_s, metadata=self._metadata)
        except DeadlineExceeded:
            return

    def follow(self, answer: admin_pb2.ChangeResponse) -> Iterator[admin_pb2.ClusterEvent]:
        """The events of an accepted change up to its end or failure; none if it changes nothing."""
        if not answer.is_change:
            return
        for event in self.events(answer.after_sequence):
            yield event
            if event.kind in _ENDS:
                return

    def _change(self, method: Any, request: Any) -> admin_pb2.ChangeResponse:
        response: admin_pb2.ChangeResponse = self._call(method, request)
        return response


@contextmanager
def as_baton_errors(address: str, *, has_begun: bool = False) -> Iterator[None]:
    """Raises gRPC errors as BatonErrors. `has_begun`: the call has had an answer, so the server was there."""
    try:
        yield
    except grpc.RpcError as error:
        raised = from_rpc_error(error)
        if isinstance(raised, NotReachable) and has_begun:
            raised = Unavailable(f"the connection to {address} was lost: {raised.message}")
        elif isinstance(raised, NotReachable):
            raised = NotReachable(f"nobody answers at {address}: {raised.message}")
        raise raised from error
