"""Whether a recipe can run on so many nodes of a site, said before it waits in the queue."""

from xgram_dist.config import Config
from xgram_dist.config.check import accumulation, check_files
from xgram_dist.config.units import parse_bytes
from xgram_dist.errors import UserError
from xgram_dist.parallel.degrees import check_degrees
from xgram_dist.slurm.site import Site


def usable_counts(config: Config, first: int, last: int, ranks: int) -> tuple[int, ...]:
    """Numbers of nodes between the two that the recipe's batch and degrees divide over; the last must be one."""
    found = []
    for count in range(first, last + 1):
        try:
            check_degrees(config, count * ranks)
            accumulation(config, count * ranks // config.parallel.tensor)
        except UserError as error:
            if count in (first, last):
                raise UserError(f"on {count} node(s) of {ranks} ranks: {error}") from None
            continue
        found.append(count)
    return tuple(found)


def check_data(config: Config) -> None:
    """The data set and the routing are there and belong to the recipe."""
    check_files(config)
    if config.data.path is None:
        return
    from xgram_dist.data.dataset import PreparedData
    from xgram_dist.train.routing import resolve_routing

    resolve_routing(config, PreparedData.open(config.data.path, "train"))


def check_memory(config: Config, counts: tuple[int, ...], site: Site) -> None:
    """The plan of the fewest nodes fits the site's GPUs. Tokens by Zipf's law: close enough for memory."""
    if site.memory_per_gpu is None or not site.gpus_per_node:
        return
    from xgram_dist.plan.advice import advise
    from xgram_dist.plan.axes import Axes
    from xgram_dist.plan.layout import plan_layout
    from xgram_dist.plan.machine import Machine
    from xgram_dist.plan.traffic import assumed_traffic

    traffic_of = assumed_traffic(config)
    limit, ranks = parse_bytes(site.memory_per_gpu), counts[0] * site.ranks
    axes = Axes.of(config, ranks)
    machine = Machine(bandwidth=site.bandwidth, node_ranks=site.ranks)
    needed = plan_layout(config, axes, machine, traffic_of(axes.data)).device_bytes
    if needed > limit:
        helps = [one.change for one in advise(config, ranks, limit, traffic_of) if one.fits][:3]
        raise UserError(
            f"the plan needs {needed / 2**30:,.1f} GiB of a GPU on {counts[0]} node(s), the site's have "
            f"memory_per_gpu = {site.memory_per_gpu}; what would help: {'; '.join(helps) or 'more nodes'}; --force "
            f"submits all the same"
        )
