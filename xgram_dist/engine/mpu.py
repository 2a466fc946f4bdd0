"""Our axes in the words of Megatron's `mpu`, which DeepSpeed asks for its process groups."""

from typing import Any

import torch.distributed as dist

from xgram_dist.engine.groups import Groups
from xgram_dist.parallel.mesh import Mesh


class Mpu:
    def __init__(self, mesh: Mesh, groups: Groups):
        self.mesh = mesh
        self.data_group, self.tensor_group = groups.of(mesh.data), groups.of(mesh.tensor)

    def get_data_parallel_group(self) -> Any:
        return self.data_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.data_group)

    def get_data_parallel_rank(self) -> int:
        return self.mesh.data.rank

    def get_data_parallel_world_size(self) -> int:
        return self.mesh.data.size

    def get_model_parallel_group(self) -> Any:
        return self.tensor_group

    def get_model_parallel_rank(self) -> int:
        return self.mesh.tensor.rank

    def get_model_parallel_world_size(self) -> int:
        return self.mesh.tensor.size

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
