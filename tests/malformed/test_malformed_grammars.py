"""Constraints made to crash or to stall the compiler of grammars, thrown at a running cluster: they fail alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest
from cluster_fixture import BUNDLED_MODEL, PlainCluster, token_spec
from flood import Flood, GoodStream

from benchmarks.nonsense import make_bomb
from cluster.pb import generation_pb2 as pb

COUNTS = [pytest.param(12, id="short"), pytest.param(2_000, id="long", marks=pytest.mark.battery)]


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("count", COUNTS)
def test_bombs_end_no_process_and_change_no_other_output(tmp_path: Path, count: int) -> None:
    good = token_spec([5, 6, 7, 8], 40, ignore_eos=False)
    good.sampling.MergeFrom(pb.SamplingParams(regex="([A-Z][a-z]{2,9} ){3}end", temperature=0.8, seed=3))
    with PlainCluster(BUNDLED_MODEL, tmp_path) as cluster:
        pids = {process.popen.pid for process in cluster.processes.values()}
        codes: Counter[str] = Counter()
        with GoodStream(cluster.address, good) as stream:
            flood = Flood(cluster.address)
            for number in range(count):
                flood.send(make_bomb(Random(number)))
            flood.close()
        codes = flood.codes
        assert not stream.wrong and stream.num_exact > 0
        assert sum(codes.values()) == count and codes["INVALID_ARGUMENT"] > 0, codes
        assert not codes["DEADLINE_EXCEEDED"], codes
        status = cluster.status()
        living = {status.router.pid, *(rank.pid for worker in status.workers for rank in worker.info.ranks)}
        assert living == pids
