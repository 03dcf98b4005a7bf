"""Silence means suspicion and then death, but not when it was the listener that was away."""

from __future__ import annotations

import pytest

from cluster.failure_detector import FailureDetector, FailureTimeouts, Liveness

TIMING = FailureTimeouts(heartbeat_s=0.5, suspect_after_s=1.5, dead_after_s=3.0)


def verdicts(pulse: FailureDetector, seconds: float) -> list[Liveness]:
    return [pulse.tick(TIMING.tick_s) for _ in range(round(seconds / TIMING.tick_s))]


def test_a_silent_peer_is_suspected_and_then_dead() -> None:
    seen = verdicts(FailureDetector(TIMING), 3.25)
    times = {verdict: (seen.index(verdict) + 1) * TIMING.tick_s for verdict in Liveness}
    assert times[Liveness.SUSPECT] == pytest.approx(1.5, abs=TIMING.tick_s)
    assert times[Liveness.DEAD] == pytest.approx(3.0, abs=TIMING.tick_s)
    assert seen == sorted(seen, key=list(Liveness).index), "a verdict got better although nothing was heard"


def test_a_peer_that_is_heard_in_time_stays_alive() -> None:
    pulse = FailureDetector(TIMING)
    for _ in range(20):
        assert set(verdicts(pulse, 1.25)) == {Liveness.ALIVE}
        pulse.heard()


def test_a_suspect_that_speaks_is_alive_again() -> None:
    pulse = FailureDetector(TIMING)
    assert verdicts(pulse, 2.0)[-1] is Liveness.SUSPECT
    pulse.heard()
    assert pulse.tick(TIMING.tick_s) is Liveness.ALIVE


def test_a_listener_that_was_away_for_an_hour_does_not_take_that_for_the_peers_silence() -> None:
    pulse = FailureDetector(TIMING)
    verdicts(pulse, 1.0)
    assert pulse.tick(3600.0) is Liveness.ALIVE
    assert pulse.silence_s == pytest.approx(1.25)
    assert verdicts(pulse, 2.0)[-1] is Liveness.DEAD, "and it still notices a peer that is really gone"


def test_what_is_heard_in_the_middle_of_a_tick_counts() -> None:
    class Interrupting(FailureTimeouts):
        """Another thread hears the peer just when a tick looks at the clock's step."""

        @property
        def tick_s(self) -> float:
            pulse.heard()
            return 0.125

    pulse = FailureDetector(TIMING)
    verdicts(pulse, 4.0)
    pulse._timing = Interrupting(0.5, 1.5, 3.0)
    pulse.tick(0.1)
    pulse._timing = TIMING
    assert pulse.tick(0.0) is Liveness.ALIVE
