"""Whether the degrees of a recipe divide the ranks and what is spread over them (pure arithmetic)."""

from xgram_dist.config.schema import Config
from xgram_dist.errors import UserError


def check_degrees(config: Config, ranks: int) -> None:
    """One sentence where a degree does not divide what it must."""
    parallel, model = config.parallel, config.model
    tensor, replicate = parallel.tensor, parallel.replicate
    if ranks % (tensor * replicate):
        raise UserError(
            f"{ranks} rank(s) are not a multiple of parallel.tensor = {tensor} x parallel.replicate = {replicate}; "
            f"change the number of ranks or one of the two"
        )
    divided = {
        "model.heads": model.heads,
        "model.kv_heads": model.kv_heads,
        "model.ffn_width": model.ffn_width,
        "model.vocabulary": model.vocabulary,
        "model.width": model.width,
    }
    if parallel.sequence_parallel:
        divided["model.sequence_length (parallel.sequence_parallel)"] = model.sequence_length
    for key, value in divided.items():
        if value % tensor:
            raise UserError(
                f"{key} = {value} is not divisible by parallel.tensor = {tensor}; choose a degree that divides it"
            )
