"""From the workers as they are and the roles that are wanted to steps, each of which moves one worker.

Pure. A worker with the tensor-parallel size that the other role wants is flipped, where both roles run the model alike:
only its label changes. Another one is started or stopped. One that was started with other settings than are wanted now
gives way to a new one: beside it where there is a device for that, else in its place. No step leaves a role with fewer
workers than its `min_workers`, nor decode with none, except that the other role serves both while the only worker of a
role is replaced in its place. The order of the steps is searched for, since devices that one step frees may be those
that another needs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.config.schema import ROLES, RoleName, ServingConfig
from cluster.errors import FailedPrecondition

OTHER: Mapping[RoleName, RoleName] = {"prefill": "decode", "decode": "prefill"}


@dataclass(frozen=True)
class Member:
    """A worker as it is. One that drains gets nothing new, and counts for no role."""

    worker_id: str
    role: RoleName
    tp_size: int
    is_ready: bool = True
    is_draining: bool = False
    is_stale: bool = False
    """It was started with other settings than are wanted."""


@dataclass(frozen=True)
class Wanted:
    """The workers that a role shall have."""

    num_workers: int
    tp_size: int = 1
    min_workers: int = 0


@dataclass(frozen=True)
class Flip:
    """The worker gets work of another role from now on; its weights, pool and prefix cache stay."""

    worker_id: str
    role: RoleName

    def __str__(self) -> str:
        return f"flip {self.worker_id} to {self.role}"


@dataclass(frozen=True)
class Start:
    """A new worker."""

    worker_id: str
    role: RoleName
    tp_size: int

    def __str__(self) -> str:
        return f"start {self.worker_id} on {_devices(self.tp_size)}"


@dataclass(frozen=True)
class Stop:
    """The worker gets nothing new, and ends when nothing is left on it."""

    worker_id: str

    def __str__(self) -> str:
        return f"drain and stop {self.worker_id}"


@dataclass(frozen=True)
class Replace:
    """The worker gets nothing new, ends when nothing is left on it, and starts again with the settings that are
    wanted. `is_last`: no other worker has its role, so that the other role serves both meanwhile."""

    worker_id: str
    role: RoleName
    tp_size: int
    is_last: bool = False

    def __str__(self) -> str:
        meanwhile = f"; {OTHER[self.role]} workers serve both meanwhile" if self.is_last else ""
        return f"drain {self.worker_id} and start it with the new settings{meanwhile}"


Step = Flip | Start | Stop | Replace


def wanted_of(config: ServingConfig) -> dict[RoleName, Wanted]:
    """The workers that a configuration asks for."""
    return {
        role: Wanted(config.role(role).num_workers, config.role(role).tensor_parallel, config.role(role).min_workers)
        for role in ROLES
    }


def plan_ratio(
    members: Sequence[Member],
    wanted: Mapping[RoleName, Wanted],
    *,
    max_devices: int | None = None,
    leaving: Collection[str] = (),
    may_flip: bool = True,
) -> tuple[Step, ...]:
    """The steps in their order; none when nothing is to be done.

    `max_devices`: that there are; None: as many as one likes. `leaving`: workers that must go whatever their role.
    `may_flip`: both roles run the model alike, so that a worker of one may take the other.
    Raises FailedPrecondition, with the number that can be met, for what cannot.
    """
    _check(members, wanted, max_devices, leaving)
    todo = _assign(members, wanted, leaving, may_flip)
    floors = least = _least_of(wanted)
    if any(m.is_stale for m in members):  # one that ends before its successor has come up cannot stay if that fails
        floors = {role: max(least[role], want.num_workers) for role, want in wanted.items()}
    beside = list(todo.with_fewer_flips())
    in_place = [kept.in_place(wanted, leaving) for kept in beside]
    for todos, kept_floors in ((beside, floors), (in_place, least), (beside, least)):
        for kept in todos:
            steps = _order(members, kept, wanted, max_devices, kept_floors)
            if steps is not None:
                return _name_starts(steps, members)
    raise FailedPrecondition(_too_narrow(members, todo, wanted, max_devices))


def apply_step(members: Sequence[Member], step: Step) -> list[Member]:
    """The workers after a step."""
    match step:
        case Flip(worker_id, role):
            return [replace(m, role=role) if m.worker_id == worker_id else m for m in members]
        case Start(worker_id, role, tp_size):
            return [*members, Member(worker_id, role, tp_size)]
        case Stop(worker_id):
            return [m for m in members if m.worker_id != worker_id]
        case Replace(worker_id):
            return [replace(m, is_stale=False) if m.worker_id == worker_id else m for m in members]


def ratio_of(members: Sequence[Member]) -> str:
    """`1:3`: workers that get prefill work, and those that get decode work."""
    return ":".join(str(_count(members, role)) for role in ROLES)


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def _num_devices(members: Sequence[Member]) -> int:
    return sum(m.tp_size for m in members)


def _count(members: Sequence[Member], role: RoleName) -> int:
    return sum(m.role == role and not m.is_draining for m in members)


def _least_of(wanted: Mapping[RoleName, Wanted]) -> dict[RoleName, int]:
    return {role: max(want.min_workers, 1 if role == "decode" else 0) for role, want in wanted.items()}


def _check(
    members: Sequence[Member], wanted: Mapping[RoleName, Wanted], max_devices: int | None, leaving: Collection[str]
) -> None:
    total = sum(want.num_workers for want in wanted.values())
    for role, least in _least_of(wanted).items():
        want = wanted[role]
        if want.num_workers < least:
            why = f"roles.{role}.min_workers is {want.min_workers}"
            if want.min_workers < least:
                why = "only decode workers generate tokens"
            most = max(least, total - wanted[OTHER[role]].min_workers)
            raise FailedPrecondition(
                f"{want.num_workers} {role} workers cannot be: {why}; {least} to {most} of {total} can"
            )
    devices = sum(want.num_workers * want.tp_size for want in wanted.values())
    if max_devices is not None and devices > max_devices:
        raise FailedPrecondition(
            f"that takes {_devices(devices)} and Ray has {max_devices}; ask for {max_devices} at most"
        )
    unknown = set(leaving) - {m.worker_id for m in members}
    if unknown:
        known = ", ".join(sorted(m.worker_id for m in members))
        raise FailedPrecondition(f"there is no worker {', '.join(sorted(unknown))}; there are {known}")


@dataclass(frozen=True)
class _Todo:
    """Flips by the role they lead to, starts by role, workers to stop, and workers to replace in their place."""

    flips: Mapping[RoleName, tuple[Member, ...]]
    starts: Mapping[RoleName, int]
    stops: tuple[Member, ...]
    replaces: tuple[Member, ...] = ()

    def with_fewer_flips(self) -> Iterator[_Todo]:
        """All flips first. Two workers that change places cannot when each is the last of its role: then one is
        started and the other stopped."""
        have = [len(self.flips[role]) for role in ROLES]
        for dropped in range(sum(have) + 1):
            for of_first in range(min(dropped, have[0]) + 1):
                if dropped - of_first <= have[1]:
                    yield self._without(dict(zip(ROLES, (of_first, dropped - of_first), strict=True)))

    def in_place(self, wanted: Mapping[RoleName, Wanted], leaving: Collection[str]) -> _Todo:
        """Replaces stale workers where they are, as far as their role wants others like them."""
        starts, replaces = dict(self.starts), []
        for member in self.stops:
            may_stay = member.is_stale and not member.is_draining and member.worker_id not in leaving
            if may_stay and member.tp_size == wanted[member.role].tp_size and starts[member.role]:
                starts[member.role] -= 1
                replaces.append(member)
        return replace(
            self,
            starts=starts,
            stops=tuple(m for m in self.stops if m not in replaces),
            replaces=tuple(replaces),
        )

    def _without(self, dropped: Mapping[RoleName, int]) -> _Todo:
        kept = {role: self.flips[role][: len(self.flips[role]) - dropped[role]] for role in ROLES}
        gone = [m for role in ROLES for m in self.flips[role][len(kept[role]) :]]
        return _Todo(kept, {role: self.starts[role] + dropped[role] for role in ROLES}, (*self.stops, *gone))


def _assign(
    members: Sequence[Member], wanted: Mapping[RoleName, Wanted], leaving: Collection[str], may_flip: bool
) -> _Todo:
    """Chooses which workers stay, flip and go; a worker is named after the role it was started for, and preferred for
    that one."""
    free = [m for m in members if not (m.is_draining or m.is_stale or m.worker_id in leaving)]

    def best_first(candidates: list[Member], role: RoleName) -> list[Member]:
        return sorted(candidates, key=lambda m: (not m.is_ready, not m.worker_id.startswith(role), m.worker_id))

    fit = {
        role: best_first([m for m in free if m.role == role and m.tp_size == want.tp_size], role)[: want.num_workers]
        for role, want in wanted.items()
    }
    staying = {m.worker_id for kept in fit.values() for m in kept}
    spare = [m for m in free if may_flip and m.worker_id not in staying]
    flips = {
        role: tuple(best_first([m for m in spare if m.role != role and m.tp_size == want.tp_size], role))[
            : want.num_workers - len(fit[role])
        ]
        for role, want in wanted.items()
    }
    flipping = {m.worker_id for chosen in flips.values() for m in chosen}
    starts = {role: want.num_workers - len(fit[role]) - len(flips[role]) for role, want in wanted.items()}
    stops = tuple(m for m in members if m.worker_id not in staying | flipping)
    return _Todo(flips, starts, stops)


def _order(
    members: Sequence[Member],
    todo: _Todo,
    wanted: Mapping[RoleName, Wanted],
    max_devices: int | None,
    floors: Mapping[RoleName, int],
) -> list[Step] | None:
    """Depth first over what has been done so far, flips before starts before stops, but stops first while there are
    more workers than before and afterwards, so that stale ones give way one at a time; None: no order keeps the
    floors."""
    most = max(_num_devices(members), sum(want.num_workers * want.tp_size for want in wanted.values()))
    queues = _queues(todo, wanted)
    done = (0,) * len(queues)
    branches: list[tuple[tuple[int, ...], list[Member], list[Step]]] = [(done, list(members), [])]
    seen = {done}
    while branches:
        done, now, steps = branches.pop()
        if all(count == len(queue) for count, queue in zip(done, queues, strict=True)):
            return steps
        ahead = []
        for index, queue in enumerate(queues):
            after = (*done[:index], done[index] + 1, *done[index + 1 :])
            if done[index] == len(queue) or after in seen:
                continue
            step = queue[done[index]]
            then = apply_step(now, step)
            is_too_large = max_devices is not None and _num_devices(then) > max_devices
            if isinstance(step, Replace):
                step, is_possible = _in_place_of(step, now, floors[step.role])
            else:
                is_possible = not (isinstance(step, Start) and is_too_large) and all(
                    _count(then, role) >= min(floor, _count(now, role)) for role, floor in floors.items()
                )
            if is_possible:
                seen.add(after)
                ahead.append((after, then, [*steps, step]))
        if _num_devices(now) > most:
            ahead.sort(key=lambda branch: not isinstance(branch[2][-1], Stop))
        branches.extend(reversed(ahead))
    return None


def _in_place_of(step: Replace, now: Sequence[Member], floor: int) -> tuple[Replace, bool]:
    """Returns the step as it is at that moment, and whether its worker can be spared: its role keeps its minimum
    without it, or is its only worker while the other role has one."""
    num_left = _count(now, step.role) - 1
    is_covered = num_left == 0 and floor <= 1 and _count(now, OTHER[step.role]) > 0
    return replace(step, is_last=num_left == 0), is_covered or num_left >= max(floor, 1)


def _queues(todo: _Todo, wanted: Mapping[RoleName, Wanted]) -> list[list[Step]]:
    """Steps of one kind are alike, so that their order among themselves does not matter: those that free most first."""
    flips: list[list[Step]] = [[Flip(m.worker_id, role) for m in todo.flips[role]] for role in ROLES]
    starts: list[list[Step]] = [
        [Start(f"{role}+{number}", role, wanted[role].tp_size) for number in range(todo.starts[role])] for role in ROLES
    ]
    leaving = sorted(todo.stops, key=lambda m: (not m.is_draining, m.is_ready, -m.tp_size, m.worker_id))
    stops: list[list[Step]] = [[Stop(m.worker_id) for m in leaving if m.role == role] for role in ROLES]
    replaces: list[Step] = [Replace(m.worker_id, m.role, m.tp_size) for m in todo.replaces]
    return [*flips, *starts, *stops, replaces]


def _name_starts(steps: Sequence[Step], members: Sequence[Member]) -> tuple[Step, ...]:
    """New workers get the lowest free numbers."""
    taken, named = {m.worker_id for m in members}, []
    for step in steps:
        if isinstance(step, Start):
            number = next(n for n in range(len(taken) + 1) if f"{step.role}-{n}" not in taken)
            step = replace(step, worker_id=f"{step.role}-{number}")
            taken.add(step.worker_id)
        named.append(step)
    return tuple(named)


def _too_narrow(
    members: Sequence[Member], todo: _Todo, wanted: Mapping[RoleName, Wanted], max_devices: int | None
) -> str:
    """Why no order is possible: only devices can be missing, since workers may leave once all have started."""
    assert max_devices is not None
    enough = max_devices + 1
    floors = _least_of(wanted)
    while all(_order(members, kept, wanted, enough, floors) is None for kept in todo.with_fewer_flips()):
        enough += 1
    is_rolling = any(m.is_stale for m in members)
    remedy = f"free {_devices(enough - max_devices)}" if is_rolling else "go there in two changes"
    return (
        f"on the way there it takes {_devices(enough)} and Ray has {max_devices}: no worker can be stopped first "
        f"without leaving its role below min_workers; lower min_workers, or {remedy}"
    )
