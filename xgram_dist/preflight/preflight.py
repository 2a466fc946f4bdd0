"""The preflight of `train --preflight GB/s`: roll call before the ranks join, links after."""

import os

import torch

from xgram_dist.config import Config
from xgram_dist.parallel.ranks import Ranks, join_ranks
from xgram_dist.preflight.facts import rank_facts
from xgram_dist.preflight.links import measure_links
from xgram_dist.preflight.roll_call import roll_call
from xgram_dist.slurm.environment import NODES


def join_checked(config: Config, device: torch.device, expected: float) -> Ranks:
    """As `join_ranks`; a rank that is missing or differs is named. `expected`: the plan's GB/s of a rank."""
    nodes = _call_roll(config)
    ranks = join_ranks(device, config.train.collective_timeout)
    links = measure_links(ranks, nodes, device)
    if links is not None and ranks.first:
        for sentence in links.sentences(expected):
            print(sentence, flush=True)
    return ranks


def _call_roll(config: Config) -> list[str]:
    """The node of every rank; from the environment of torchrun or srun, like joining itself."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    facts = rank_facts(config)
    if size == 1:
        return [facts["node"]]
    named = [node for node in os.environ.get(NODES, "").split(",") if node]
    port = int(os.environ["MASTER_PORT"]) + 1
    return roll_call(int(os.environ["RANK"]), size, os.environ["MASTER_ADDR"], port, named, facts)
