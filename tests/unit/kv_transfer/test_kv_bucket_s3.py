"""The same objects in S3's own protocol, against moto's server: `pip install s3fs 'moto[server]'` runs these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kv_transfer.block_store import StoreObjects
from kv_transfer.bucket_store import BucketStore
from kv_transfer.layout import KvLayout

pytest.importorskip("s3fs")
server = pytest.importorskip("moto.server")
boto3 = pytest.importorskip("boto3")

BYTES = 100_000
KEYS = [(number % 2, bytes([number]) * 16) for number in range(40)]
LAYOUT = KvLayout(2, 2, 8, "float32", 1, 16, "model@revision")
URL = "s3://cluster/kv"


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of S3's stand-in, which has one bucket."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    boto3.client("s3").create_bucket(Bucket="cluster")
    yield f"http://{host}:{port}"
    running.stop()


def block_of(key: tuple[int, bytes]) -> bytes:
    return (key[1] * 7000)[:BYTES]


def opened() -> StoreObjects:
    return StoreObjects(BucketStore(URL), LAYOUT, "native", 0, BYTES, 1 << 30)


def test_blocks_come_back_and_a_flush_deletes_them(storage: str) -> None:
    BucketStore(URL).try_out()
    opened().push(KEYS, map(block_of, KEYS))
    again = opened()
    assert all(again.find(KEYS, 10.0)) and again.find([(0, b"x" * 16)], 10.0) == [False]
    assert [bytes(block) for block in again.fetch(KEYS)] == list(map(block_of, KEYS))
    assert len([*BucketStore(URL).objects()]) == len(KEYS) == again.flush()
    assert not [*BucketStore(URL).objects()]


def test_a_bucket_that_is_not_there_or_a_server_that_is_away_is_an_oserror(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OSError, match="bucket"):
        BucketStore("s3://another/kv").try_out()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(OSError, match=r"127\.0\.0\.1:9"):
        BucketStore(URL).try_out()
