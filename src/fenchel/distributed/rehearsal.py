"""All ranks of a group in one process, one thread each: to try out and to count what would travel among machines."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from fenchel._checks import check_callable, check_count
from fenchel.distributed.collectives import Peers, Wait

T = TypeVar("T")


@dataclass(frozen=True)
class Transfer:
    """One collective, or one message, as rank 0 saw it.

    Args:
        name: ``"all_reduce"``, ``"all_gather"``, ``"broadcast"`` or ``"send"``.
        numbers: how many numbers rank 0 gave.
        bytes: how many bytes these take.
    """

    name: str
    numbers: int
    bytes: int


@dataclass(frozen=True)
class Rehearsal(Generic[T]):
    """What :func:`rehearse` returns.

    Args:
        results: of all ranks, in their order.
        transfers: all collectives and messages in which rank 0 took part, in their order.
    """

    results: list[T]
    transfers: list[Transfer]

    @property
    def bytes(self) -> int:
        """What rank 0 gave in all transfers, in bytes."""
        return sum(each.bytes for each in self.transfers)


def rehearse(function: Callable[[int, Any], T], ranks: int) -> Rehearsal[T]:
    """Call a function once per rank of a group that exists in this process alone, one thread per rank.

    The group is what the functions of ``fenchel.distributed`` take as ``group=``: they run as on as many machines, with
    the same collectives, whose number and sizes are recorded. Functions of ``torch.distributed`` itself do not take it.
    If a rank raises an exception, or ends while others wait for it, all ranks end.

    Args:
        function: called with the rank and the group.
        ranks: how many; a thread each, so thousands need a system that allows as many.

    Returns:
        The results of all ranks, and what was exchanged.

    Raises:
        Exception: that of the first rank that raised one.

    Example:
        >>> import torch, fenchel.distributed
        >>> from fenchel.distributed import rehearse
        >>> parts = torch.tensor([2.0, 1.0, -1.0, 1.5]).chunk(2)
        >>> run = rehearse(lambda rank, group: fenchel.distributed.entmax(parts[rank], group=group), 2)
        >>> torch.cat(run.results)
        tensor([0.6242, 0.0841, 0.0000, 0.2917])
        >>> [each.name for each in run.transfers][:2]
        ['all_reduce', 'all_reduce']
    """
    check_callable(function, "function", "a function of a rank and a group")
    ranks = check_count(ranks, "ranks")
    room = _Room(ranks)
    results: list[Any] = [None] * ranks
    records = torch.is_grad_enabled()

    def play(rank: int) -> None:
        with room.turn:
            try:
                with torch.set_grad_enabled(records):
                    results[rank] = function(rank, _Seat(room, rank))
            except BaseException as error:
                room.leave(rank, error)
            else:
                room.leave(rank, None)

    threads = [threading.Thread(target=play, args=(rank,), daemon=True) for rank in range(ranks)]
    started = []
    helpers = torch.get_num_threads()
    torch.set_num_threads(1)  # or each of thousands of threads would have helpers of its own
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        with room.turn:
            room.leave(len(started), ValueError(f"ranks must be few enough for a thread each, got {ranks} ({error})"))
    finally:
        for thread in started:
            thread.join()
        torch.set_num_threads(helpers)
    if room.failure is not None:
        raise room.failure
    return Rehearsal(results, room.transfers)


class _Left(RuntimeError):
    """A rank waits for another one that has ended."""

    def __init__(self) -> None:
        super().__init__("another rank has ended, or raised an error, while this one waited for it")


_NOTHING = object()


class _Room:
    """Where the threads of all ranks meet.

    One runs at a time, the one that has ``turn``, until it waits for others: thousands of threads that compete for the
    interpreter would do little else.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.turn = threading.Lock()
        self.bells = [threading.Lock() for _ in range(ranks)]
        for bell in self.bells:
            bell.acquire()
        self.given: list[Any] = [None] * ranks
        self.answers: list[Any] = [None] * ranks
        self.waiting: list[int] = []
        self.awaiting_mail: set[int] = set()
        self.mail: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self.gone: set[int] = set()
        self.failure: BaseException | None = None
        self.transfers: list[Transfer] = []

    def meet(self, rank: int, given: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """What ``combine`` makes of all ranks' contributions."""
        if self.gone:
            raise _Left
        self.given[rank] = given
        if len(self.waiting) == self.ranks - 1:
            answer = combine(self.given)
            waiting, self.waiting = self.waiting, []
            for other in waiting:
                self.answers[other] = answer
                self.bells[other].release()
            return answer
        self.answers[rank] = _NOTHING
        self.waiting.append(rank)
        self._pause(rank)
        if self.answers[rank] is _NOTHING:
            raise _Left
        return self.answers[rank]

    def _pause(self, rank: int) -> None:
        """Let others run until the bell of this rank rings."""
        self.turn.release()
        self.bells[rank].acquire()
        self.turn.acquire()

    def post(self, rank: int, to: int, tensors: list[Tensor]) -> None:
        """Leave tensors for another rank."""
        self.mail[rank, to].extend(tensors)
        if to in self.awaiting_mail:
            self.awaiting_mail.remove(to)
            self.bells[to].release()

    def fetch(self, rank: int, source: int) -> Tensor:
        """The next tensor that another rank has left."""
        box = self.mail[source, rank]
        while not box:
            if source in self.gone:
                raise _Left
            self.awaiting_mail.add(rank)
            self._pause(rank)
        return box.popleft()

    def leave(self, rank: int, error: BaseException | None) -> None:
        """A rank has ended; the exception that counts is the one that came first, not those of who waited."""
        self.gone.add(rank)
        if error is not None and (self.failure is None or isinstance(self.failure, _Left)):
            self.failure = error
        for other in (*self.waiting, *self.awaiting_mail):
            self.bells[other].release()
        self.waiting.clear()
        self.awaiting_mail.clear()


class _Seat(Peers):
    """The place of one rank in the room."""

    def __init__(self, room: _Room, rank: int) -> None:
        self.room, self.rank, self.size = room, rank, room.ranks

    def _record(self, name: str, *tensors: Tensor) -> None:
        if self.rank == 0:
            count = sum(each.numel() for each in tensors)
            self.room.transfers.append(Transfer(name, count, sum(t.numel() * t.element_size() for t in tensors)))

    def all_reduce(self, tensor: Tensor, largest: bool) -> None:
        self._record("all_reduce", tensor)

        def combine(given: list[Tensor]) -> Tensor:
            every = torch.stack(given)
            return every.amax(0) if largest else every.sum(0, dtype=every.dtype)

        tensor.detach().copy_(self.room.meet(self.rank, tensor.detach(), combine))

    def all_gather(self, own: Tensor) -> Tensor:
        self._record("all_gather", own)
        found: Tensor = self.room.meet(self.rank, own.detach(), torch.stack)
        return found

    def broadcast(self, tensor: Tensor, source: int) -> None:
        if self.rank == source:
            self._record("broadcast", tensor)
        tensor.detach().copy_(self.room.meet(self.rank, tensor.detach(), lambda given: given[source].clone()))

    def send(self, tensors: Sequence[Tensor], to: int, into: Sequence[Tensor], source: int) -> list[Wait]:
        self._record("send", *tensors)
        self.room.post(self.rank, to, [each.detach().clone() for each in tensors if each.numel()])

        def receive(tensor: Tensor) -> None:
            tensor.detach().copy_(self.room.fetch(self.rank, source))

        return [lambda each=each: receive(each) for each in into if each.numel()]  # type: ignore[misc]
