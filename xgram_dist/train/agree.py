"""All ranks must train the same thing: config, routing, data and code are compared before anything is built."""

import hashlib

from xgram_dist import __version__
from xgram_dist.config import Config, dump_config
from xgram_dist.errors import UserError
from xgram_dist.memory.routing.routing import Routing
from xgram_dist.parallel.ranks import Ranks


def check_agreement(ranks: Ranks, config: Config, routing: Routing | None, fingerprint: str) -> None:
    mine = {
        "version": __version__,
        "config": hashlib.sha256(dump_config(config).encode()).hexdigest()[:16],
        "routing": "none" if routing is None else routing.sha256()[:16],
        "data": fingerprint[:16],
    }
    everyone = ranks.gather_objects(mine)
    for what in mine:
        for rank, theirs in enumerate(everyone):
            if theirs[what] != everyone[0][what]:
                raise UserError(
                    f"rank {rank} has another {what} ({theirs[what]}) than rank 0 ({everyone[0][what]}); start all "
                    f"ranks from the same recipe, overrides and files"
                )
