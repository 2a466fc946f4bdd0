"""The loop with torchrec's EmbeddingCollection, rows sharded over the ranks."""

import torch
import torch.distributed as dist
from common import BATCH, EPSILON, GPT, INITIAL, LENGTH, NAMES, RATE, TABLE_RATE, VOCABULARY, WIDTH, text, timed
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(GPT())
optimizer = torch.optim.AdamW(model.parameters(), RATE)
collection = EmbeddingCollection(
    device=torch.device("meta"),
    tables=[
        EmbeddingConfig(
            name=name,
            embedding_dim=WIDTH,
            num_embeddings=VOCABULARY,
            feature_names=[name],
            weight_init_min=-INITIAL,
            weight_init_max=INITIAL,
        )
        for name in NAMES
    ],
)
sharder = EmbeddingCollectionSharder(
    fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": TABLE_RATE, "eps": EPSILON}
)
plan = construct_module_sharding_plan(
    collection,
    {name: row_wise(compute_kernel=EmbeddingComputeKernel.FUSED.value) for name in NAMES},
    sharder=sharder,
    local_size=dist.get_world_size(),
    world_size=dist.get_world_size(),
    device_type="cpu",
)
tables = DistributedModelParallel(
    collection,
    env=ShardingEnv.from_process_group(dist.group.WORLD),
    device=torch.device("cpu"),
    plan=ShardingPlan({"": plan}),
    sharders=[sharder],
)
batches = text(dist.get_rank())
ones = torch.ones(len(NAMES) * BATCH * LENGTH, dtype=torch.int32)


def step(number: int) -> Tensor:
    tokens = batches[number]
    ids = KeyedJaggedTensor(keys=NAMES, values=tokens.flatten().repeat(len(NAMES)), lengths=ones)
    found = tables(ids)
    loss = model(tokens, {name: found[name].values().view(BATCH, LENGTH, WIDTH) for name in NAMES})
    optimizer.zero_grad()
    loss.backward()  # the update of the rows is part of it
    optimizer.step()
    return loss.detach()


timed(step)
dist.destroy_process_group()
