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
    meeting = _Meeting(ranks)
    results: list[Any] = [None] * ranks
    records = torch.is_grad_enabled()

    def run(rank: int) -> None:
        with meeting.turn:
            try:
                with torch.set_grad_enabled(records):
                    results[rank] = function(rank, _ThreadPeers(meeting, rank))
            except BaseException as error:
                meeting.end(rank, error)
            else:
                meeting.end(rank, None)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    started = []
    helpers = torch.get_num_threads()
    torch.set_num_threads(1)  # or each of thousands of threads would have helpers of its own
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        with meeting.turn:
            meeting.end(len(started), ValueError(f"ranks must be few enough for a thread each, got {ranks} ({error})"))
    finally:
        for thread in started:
            thread.join()
        torch.set_num_threads(helpers)
    if meeting.failure is not None:
        raise meeting.failure
    return Rehearsal(results, meeting.transfers)


class _OtherEndedError(RuntimeError):
    """Raised in a rank that waits for another one that has ended."""

    def __init__(self) -> None:
        super().__init__("another rank has ended, or raised an error, while this one waited for it")


_NOTHING = object()


class _Meeting:
    """What the threads of all ranks share: contributions to collectives, and messages.

    One runs at a time, the one that has ``turn``, until it waits for others: thousands of threads that compete for the
    interpreter would do little else.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.turn = threading.Lock()
        self.wakers = [threading.Lock() for _ in range(ranks)]
        for waker in self.wakers:
            waker.acquire()
        self.given: list[Any] = [None] * ranks
        self.answers: list[Any] = [None] * ranks
        self.waiting: list[int] = []
        self.awaiting_message: set[int] = set()
        self.messages: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self.ended: set[int] = set()
        self.failure: BaseException | None = None
        self.transfers: list[Transfer] = []

    def combine(self, rank: int, given: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """What ``combine`` makes of all ranks' contributions."""
        if self.ended:
            raise _OtherEndedError
        self.given[rank] = given
        if len(self.waiting) == self.ranks - 1:
            answer = combine(self.given)
            waiting, self.waiting = self.waiting, []
            for other in waiting:
                self.answers[other] = answer
                self.wakers[other].release()
            return answer
        self.answers[rank] = _NOTHING
        self.waiting.append(rank)
        self._pause(rank)
        if self.answers[rank] is _NOTHING:
            raise _OtherEndedError
        return self.answers[rank]

    def _pause(self, rank: int) -> None:
        """Let other ranks run until one of them releases the waker of this rank."""
        self.turn.release()
        self.wakers[rank].acquire()
        self.turn.acquire()

    def send(self, rank: int, to: int, tensors: list[Tensor]) -> None:
        """Append tensors to the messages for another rank."""
        self.messages[rank, to].extend(tensors)
        if to in self.awaiting_message:
            self.awaiting_message.remove(to)
            self.wakers[to].release()

    def receive(self, rank: int, source: int) -> Tensor:
        """The next tensor that another rank has sent; waits for it."""
        queue = self.messages[source, rank]
        while not queue:
            if source in self.ended:
                raise _OtherEndedError
            self.awaiting_message.add(rank)
            self._pause(rank)
        return queue.popleft()

    def end(self, rank: int, error: BaseException | None) -> None:
        """Record that a rank has ended. Of several errors the first is kept, not those of ranks that waited for it."""
        self.ended.add(rank)
        if error is not None and (self.failure is None or isinstance(self.failure, _OtherEndedError)):
            self.failure = error
        for other in (*self.waiting, *self.awaiting_message):
            self.wakers[other].release()
        self.waiting.clear()
        self.awaiting_message.clear()


class _ThreadPeers(Peers):
    """The other ranks, as one rank sees them."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, meeting.ranks

    def _record(self, name: str, *tensors: Tensor) -> None:
        if self.rank == 0:
            count = sum(each.numel() for each in tensors)
            self.meeting.transfers.append(Transfer(name, count, sum(t.numel() * t.element_size() for t in tensors)))

    def all_reduce(self, tensor: Tensor, largest: bool) -> None:
        self._record("all_reduce", tensor)

        def combine(given: list[Tensor]) -> Tensor:
            every = torch.stack(given)
            return every.amax(0) if largest else every.sum(0, dtype=every.dtype)

        tensor.detach().copy_(self.meeting.combine(self.rank, tensor.detach(), combine))

    def all_gather(self, own: Tensor) -> Tensor:
        self._record("all_gather", own)
        found: Tensor = self.meeting.combine(self.rank, own.detach(), torch.stack)
        return found

    def broadcast(self, tensor: Tensor, source: int) -> None:
        if self.rank == source:
            self._record("broadcast", tensor)
        tensor.detach().copy_(self.meeting.combine(self.rank, tensor.detach(), lambda given: given[source].clone()))

    def send(self, tensors: Sequence[Tensor], to: int, into: Sequence[Tensor], source: int) -> list[Wait]:
        self._record("send", *tensors)
        self.meeting.send(self.rank, to, [each.detach().clone() for each in tensors if each.numel()])

        def receive(tensor: Tensor) -> None:
            tensor.detach().copy_(self.meeting.receive(self.rank, source))

        return [lambda each=each: receive(each) for each in into if each.numel()]  # type: ignore[misc]
