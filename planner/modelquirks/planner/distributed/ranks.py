"""``Ranks``: the processes that load together, each waiting for what the others have to say."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

from modelquirks.planner.execution.loaditem import ExecutionError

__all__ = ["Ranks", "together"]

T = TypeVar("T")
Judge = Callable[[Sequence[Any]], str | None]

_PATIENCE = 1800.0
"""Seconds, those of ``init_process_group``."""


class _Answer(NamedTuple):
    """What a rank has to say about a step."""

    fault: str | None
    told: Any
    """Plain data, if there is no fault."""


class Ranks:
    """All ranks of one group. Every one of them has to take the same steps.

    Rank 0 of the group hears each of the others, so that it can name the one that does not
    answer, and tells all of them. Messages go through gloo, whatever moves the tensors.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        """Talk through *group*; see :func:`together`."""
        self._group, self._timeout = group, timeout
        self._names = dist.get_process_group_ranks(group)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def step(
        self,
        what: str,
        work: Callable[[], T],
        *,
        tell: Callable[[T], Any] | None = None,
        judge: Judge | None = None,
    ) -> T:
        """Do *work*, and return what it gives once every rank has done it.

        *tell* makes plain data of a result; *judge* is given that of all ranks, by rank, on one of
        them, and says what is wrong with it. ExecutionError on every rank, with the reason, if
        any rank fails or does not answer, and if *judge* finds something. *what* completes
        "cannot …".
        """
        done: list[T] = []
        cause: Exception | None = None
        try:
            done.append(work())
            answer = _Answer(None, None if tell is None else tell(done[0]))
        except Exception as error:
            cause, answer = error, _Answer(str(error) or repr(error), None)
        problem = self._verdict(answer, judge)
        if problem is not None:
            raise ExecutionError(f"cannot {what}: {problem}") from cause
        return done[0]

    def _verdict(self, answer: _Answer, judge: Judge | None) -> str | None:
        """Return what keeps the ranks from going on; the same on each of them.

        Only if one is lost after its answer and before the verdict reaches it, those that were told
        first go on: the next step, or their next collective, meets the loss.
        """
        if self.rank:
            first = self._names[0]
            try:
                deadline = time.monotonic() + 2 * self._timeout + 10  # it waits for the others
                self._send(0, answer, deadline)
                verdict: str | None = json.loads(self._receive(0, deadline))
            except RuntimeError as error:
                return f"rank {first}, which collects the answers, is lost ({_brief(error)})"
            return verdict
        deadline = time.monotonic() + self._timeout
        answers = {0: answer}
        for rank in range(1, self.size):
            answers[rank] = self._answer_of(rank, deadline)
        problem = self._problem(answers, judge)
        for rank in range(1, self.size):
            try:
                self._send(rank, problem, time.monotonic() + 10)
            except RuntimeError:  # lost since it answered
                problem = problem or f"rank {self._names[rank]} is lost"
        return problem

    def _answer_of(self, rank: int, deadline: float) -> _Answer:
        try:
            return _Answer(*json.loads(self._receive(rank, deadline)))
        except RuntimeError as error:
            late = f"no answer within {self._timeout:g} s" if "imed out" in str(error) else "lost"
            return _Answer(f"{late} ({_brief(error)})", None)

    def _problem(self, answers: Mapping[int, _Answer], judge: Judge | None) -> str | None:
        by_fault: dict[str, list[int]] = {}
        for rank, answer in answers.items():
            if answer.fault is not None:
                by_fault.setdefault(answer.fault, []).append(self._names[rank])
        if by_fault:
            told = [f"{ranks_told(ranks)}: {fault}" for fault, ranks in by_fault.items()]
            more = f"\n… and {len(told) - 10} more" if len(told) > 10 else ""
            return "\n".join(told[:10]) + more
        if judge is None:
            return None
        return judge([answers[rank].told for rank in range(self.size)])

    def _send(self, rank: int, message: Any, deadline: float) -> None:
        data = json.dumps(message).encode()
        for each in (len(data).to_bytes(8, "little"), data):
            tensor = torch.frombuffer(bytearray(each), dtype=torch.uint8)
            work = dist.isend(tensor, group=self._group, group_dst=rank)
            self._wait(work, deadline)

    def _receive(self, rank: int, deadline: float) -> bytes:
        length = self._receive_bytes(rank, 8, deadline)
        return self._receive_bytes(rank, int.from_bytes(length, "little"), deadline)

    def _receive_bytes(self, rank: int, size: int, deadline: float) -> bytes:
        tensor = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._wait(dist.irecv(tensor, group=self._group, group_src=rank), deadline)
        return tensor.numpy().tobytes()

    def _wait(self, work: dist.Work | None, deadline: float) -> None:
        if work is not None:
            work.wait(timedelta(seconds=max(0.1, deadline - time.monotonic())))


def ranks_told(ranks: Sequence[int]) -> str:
    """Return for example ``rank 3`` or ``ranks 0, 1, 2, … (64 of them)``.

    >>> ranks_told([3]), ranks_told([0, 2])
    ('rank 3', 'ranks 0, 2')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f", … ({len(ranks)} of them)" if len(ranks) > 10 else ""
    return f"ranks {', '.join(map(str, ranks[:10]))}{more}"


@contextmanager
def together(
    group: dist.ProcessGroup | None = None, timeout: float | None = None
) -> Generator[Ranks, None, None]:
    """Have the ranks of *group* act together; without one all of torch.distributed.

    *timeout* is how many seconds one may be behind the others, 1800 if it is None. ExecutionError
    if torch.distributed is not initialized.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ExecutionError(
            "torch.distributed is not initialized: start the program with torchrun and call "
            "torch.distributed.init_process_group() before loading"
        )
    patience = _PATIENCE if timeout is None else timeout
    if group is not None:
        if "gloo" not in dist.get_backend_config(group):
            raise ExecutionError(
                f"the ranks of a group talk through gloo, this one is {dist.get_backend(group)}: "
                "give one made by torch.distributed.new_group(…, backend='gloo')"
            )
        yield Ranks(group, patience)
        return
    try:
        # Of all ranks, so that each is a member.
        own = cast(
            dist.ProcessGroup,
            dist.new_group(timeout=timedelta(seconds=patience), backend="gloo"),
        )
    except RuntimeError as error:
        raise ExecutionError(
            f"cannot load together: not every rank came within {patience:g} s ({_brief(error)})"
        ) from error
    try:
        yield Ranks(own, patience)
    finally:
        dist.destroy_process_group(own)


def _brief(error: BaseException) -> str:
    """Return the first line of a message of torch, without its file and line."""
    line = (str(error).splitlines() or [repr(error)])[0]
    return line.partition("] ")[2] or line
