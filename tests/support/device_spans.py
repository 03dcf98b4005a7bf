"""A device that computes one step after another, behind the process that launches them (`worker.steps.DeviceSpan`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class FakeDevice:
    """Its clock stands still until the test moves it on."""

    def __init__(self, seconds_of_steps: Iterable[float]) -> None:
        self.now = 0.0
        self.calls: list[str] = []
        self._seconds: Iterator[float] = iter(seconds_of_steps)
        self._free_at = 0.0
        self._num_begun = 0

    def begin(self) -> FakeSpan:
        self._num_begun += 1
        return FakeSpan(self, self._num_begun, next(self._seconds))

    def take(self, seconds: float) -> tuple[float, float]:
        """Begin and end of the next step that takes so long."""
        begun = max(self.now, self._free_at)
        self._free_at = begun + seconds
        return begun, self._free_at


class FakeSpan:
    """A step that takes the time it is given, from when the device is free."""

    def __init__(self, device: FakeDevice, number: int, seconds: float) -> None:
        self._device = device
        self._number = number
        self.begun_at, self._ended_at = device.take(seconds)
        self._note("begins")

    def end(self) -> None:
        self._note("ends")

    def wait(self) -> None:
        self._note("is awaited")
        self._device.now = max(self._device.now, self._ended_at)

    def seconds(self) -> float | None:
        return self._ended_at - self.begun_at if self._device.now >= self._ended_at else None

    def seconds_until(self, following: FakeSpan) -> float | None:
        return following.begun_at - self.begun_at if self._device.now >= following.begun_at else None

    def _note(self, what: str) -> None:
        self._device.calls.append(f"step {self._number} {what}")
