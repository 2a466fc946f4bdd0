"""TorchRec: tables sharded over the ranks by rows, its own exchange, row-wise Adagrad fused into the backward pass.

On CPU it has neither Adam nor its removal of duplicate ids, so one peer sends every id as it comes (as shipped) and
the other makes ids unique by hand, on one table that holds the rows of all tables side by side.

TorchRec gives a rank a contiguous block of rows. Where frequent tokens have low ids, as tokenizers number them, the
first rank would serve nearly all; rows are therefore numbered so that block r holds the tokens with `token % ranks ==
r`. That is done before the clock starts.
"""

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from workload import EPSILON, INITIAL, LEARNING_RATE, Workload, half_mean_square, half_mean_square_of


class AsShipped:
    note = "TorchRec EmbeddingCollection, row-wise, every id sent, fused row-wise Adagrad"

    def __init__(self, workload: Workload):
        self.workload = workload
        self.names = [f"table{number}" for number in range(workload.tables)]
        self.model = _sharded(workload, self.names, workload.width)

    def prepare(self, tokens: Tensor) -> KeyedJaggedTensor:
        return _one_id_a_sample(self.names, _spread(tokens, self.workload).repeat(len(self.names)))

    def step(self, ready: KeyedJaggedTensor) -> Tensor:
        looked_up = self.model(ready)
        loss = half_mean_square([looked_up[name].values() for name in self.names])
        loss.backward()
        return loss.detach()


class UniqueByHand:
    note = "TorchRec EmbeddingCollection of one wide table, row-wise, ids made unique by hand, fused row-wise Adagrad"

    def __init__(self, workload: Workload):
        self.workload = workload
        self.model = _sharded(workload, ["table"], workload.tables * workload.width)

    def prepare(self, tokens: Tensor) -> Tensor:
        return _spread(tokens, self.workload)

    def step(self, ready: Tensor) -> Tensor:
        distinct, inverse = torch.unique(ready, return_inverse=True)
        vectors = self.model(_one_id_a_sample(["table"], distinct))["table"].values()
        loss = half_mean_square_of(vectors, inverse)
        loss.backward()
        return loss.detach()


def _sharded(workload: Workload, names: list[str], width: int) -> nn.Module:
    collection = EmbeddingCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingConfig(
                name=name,
                embedding_dim=width,
                num_embeddings=workload.rows,
                feature_names=[name],
                weight_init_min=-INITIAL,
                weight_init_max=INITIAL,
            )
            for name in names
        ],
    )
    sharder = EmbeddingCollectionSharder(
        fused_params={
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": LEARNING_RATE,
            "eps": EPSILON,
        }
    )
    plan = construct_module_sharding_plan(
        collection,
        {name: row_wise(compute_kernel=EmbeddingComputeKernel.FUSED.value) for name in names},
        sharder=sharder,
        local_size=workload.ranks,
        world_size=workload.ranks,
        device_type="cpu",
    )
    return DistributedModelParallel(
        collection,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"": plan}),
        sharders=[sharder],
    )


def _one_id_a_sample(names: list[str], ids: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=names, values=ids, lengths=torch.ones(len(ids), dtype=torch.int32))


def _spread(tokens: Tensor, workload: Workload) -> Tensor:
    """Token -> row, one to one: first all tokens of remainder 0, then those of remainder 1, ..."""
    remainder = tokens % workload.ranks
    first = remainder * (workload.rows // workload.ranks) + remainder.clamp(max=workload.rows % workload.ranks)
    return first + tokens // workload.ranks
