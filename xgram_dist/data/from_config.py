"""A run's data from its recipe: the data sets that it names, and the loader over them."""

from xgram_dist.config import Config
from xgram_dist.data.dataset import PreparedData
from xgram_dist.data.loader import Loader
from xgram_dist.data.stages import StageRequest
from xgram_dist.errors import UserError


def open_data(config: Config, split: str, path: str | None, remote: str | None) -> PreparedData:
    """One data set, with the recipe's cache."""
    return PreparedData.open(path, split, remote=remote, cache=config.data.cache, cache_limit=config.data.cache_limit)


def open_training_data(config: Config) -> PreparedData:
    data = open_data(config, "train", config.data.path, config.data.remote)
    _check_packing(config, data)
    return data


def _check_packing(config: Config, data: PreparedData) -> None:
    packing = "join" if data.manifest.sequence_length is None else "whole_documents"
    if config.data.packing not in (None, packing):
        flag = {
            "join": "without --whole-documents",
            "whole_documents": f"with --whole-documents {config.model.sequence_length}",
        }[config.data.packing]
        raise UserError(
            f"data.packing = {config.data.packing}, but '{data.folder}' was prepared for data.packing={packing}; "
            f"set that, or prepare it {flag}"
        )
    if data.manifest.sequence_length is not None and not config.model.label_masking:
        raise UserError(
            f"model.label_masking = false, but '{data.folder}' is padded (prepared with --whole-documents), which "
            f"would be trained on; set model.label_masking=true"
        )


def build_loader(config: Config, data: PreparedData, rank: int = 0, ranks: int = 1) -> Loader:
    """`rank` and `ranks`: of the data axis."""
    return Loader(
        data,
        sequence_length=config.model.sequence_length,
        global_batch=config.train.global_batch,
        micro_batch=config.train.micro_batch,
        seed=config.train.seed,
        weights=config.data.weights,
        stages=_stage_requests(config, data),
        skip=config.data.skip,
        rank=rank,
        ranks=ranks,
        prefetch=config.data.prefetch,
        vocabulary=config.model.vocabulary,
    )


def _stage_requests(config: Config, data: PreparedData) -> list[StageRequest]:
    requests = []
    for number, stage in enumerate(config.data.stages):
        key = f"data.stages[{number}]"
        if stage.path is not None and stage.remote is not None:
            raise UserError(f"{key}: set path or remote, not both")
        own = data
        if stage.path is not None or stage.remote is not None:
            own = open_data(config, "train", stage.path, stage.remote)
            _check_packing(config, own)
        weights = stage.weights if stage.weights is not None or own is not data else config.data.weights
        length = stage.sequence_length or config.model.sequence_length
        requests.append(StageRequest(own, length, weights, stage.from_tokens, key))
    return requests
