"""One rank of many: the exchange plan of rank 0, the other ranks simulated.

Every rank's planner runs in a thread; their all-to-alls meet in memory. What rank 0 received is kept, so that it can
plan again, alone: `ReplayedGroup` answers as the others did. Nothing here knows what the messages mean.
"""

import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.estimate.traffic import zipf
from xgram_dist.model.methods.base import table_layout
from xgram_dist.parallel.process_group import CompletedWork, ProcessGroup
from xgram_dist.tables.layout import routing_settings
from xgram_dist.tables.routing import Routing
from xgram_dist.tables.routing_build import build_routing


class Meeting:
    """Where the messages of all ranks' threads lie."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size, timeout=120)
        self.sent: list[Any] = [None] * size


class MeetingGroup(ProcessGroup):
    """A rank's end of a meeting. Keeps what it received."""

    def __init__(self, rank: int, meeting: Meeting):
        super().__init__(rank, len(meeting.sent))
        self._meeting = meeting
        self.received: list[Tensor] = []

    def all_to_all(self, sent: Tensor, sent_counts: list[int], received_counts: list[int]) -> tuple[Tensor, Any]:
        segments = self._swap(sent.split(sent_counts))
        received = torch.cat([of_rank[self.rank] for of_rank in segments])
        assert len(received) == sum(received_counts)
        self.received.append(received)
        return received, CompletedWork()

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        tensor = torch.stack(self._swap(tensor)).amax(0)
        self.received.append(tensor)
        return tensor

    def _swap(self, sent: Any) -> list[Any]:
        self._meeting.sent[self.rank] = sent
        self._meeting.barrier.wait()
        everything = list(self._meeting.sent)
        self._meeting.barrier.wait()
        return everything


class ReplayedGroup(ProcessGroup):
    """Answers with what was received before, in the same order, again and again."""

    def __init__(self, rank: int, size: int, received: list[Tensor]):
        super().__init__(rank, size)
        self._received, self._next = received, 0

    def all_to_all(self, sent: Tensor, sent_counts: list[int], received_counts: list[int]) -> tuple[Tensor, Any]:
        return self._answer(), CompletedWork()

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        return self._answer()

    def _answer(self) -> Tensor:
        self._next += 1
        return self._received[(self._next - 1) % len(self._received)].clone()


class EqualReplicas(ProcessGroup):
    """Replicas of the tables that touch the rows of this one."""

    def all_to_all(self, sent: Tensor, sent_counts: list[int], received_counts: list[int]) -> tuple[Tensor, Any]:
        return sent, CompletedWork()


def frequencies(config: Config) -> np.ndarray:
    counts = zipf(config.model.vocabulary)
    return counts / counts.sum()


def routing_of(config: Config) -> Routing | None:
    layout = table_layout(config)
    return build_routing(frequencies(config), routing_settings(config), layout.num_views) if layout.hashed else None


def draw_tokens(config: Config, data_ranks: int, rank: int) -> Tensor:
    """[A, B, T]: a step of one rank, tokens drawn by frequency."""
    train, length = config.train, config.model.sequence_length
    micro_batches = train.global_batch // data_ranks // train.micro_batch
    edges = np.cumsum(frequencies(config))
    drawn = np.searchsorted(edges, np.random.default_rng(rank).random((micro_batches, train.micro_batch, length)))
    return torch.from_numpy(np.minimum(drawn, len(edges) - 1))


def simulate_plan(build_planner: Any, tokens: list[Tensor]) -> list[Tensor]:
    """What rank 0 receives while all ranks plan their tokens. `build_planner(group)`: the planner of a rank."""
    meeting = Meeting(len(tokens))
    groups = [MeetingGroup(rank, meeting) for rank in range(len(tokens))]
    planners = [build_planner(group) for group in groups]
    errors: list[BaseException] = []

    def plan(rank: int) -> None:
        try:
            planners[rank].plan(tokens[rank])
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=plan, args=(rank,)) for rank in range(len(tokens))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return groups[0].received
