"""If these fail, ranks on GPUs share one, allocate on another's, or do not repeat. The GPUs are stand-ins."""

import os
import threading
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from xgram_dist.environment import Place
from xgram_dist.errors import UserError
from xgram_dist.parallel import device as device_module
from xgram_dist.parallel.device import begin_planning_thread, choose_device, collective_options, make_deterministic

GPU = torch.device("cuda", 3)


@pytest.fixture
def gpus(monkeypatch):
    """Makes the machine one with so many visible GPUs; the devices that were set, by thread."""
    for name in (*device_module.GPU_RESTRICTIONS, *device_module.ALLOCATOR_SETTINGS, "LOCAL_RANK"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda one: chosen.append((threading.current_thread().name, one)))

    def make(count, **environment):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return chosen

    return make


def test_a_rank_takes_the_gpu_of_its_number(gpus):
    chosen = gpus(8, LOCAL_RANK="3")
    assert choose_device() == GPU
    assert chosen == [("MainThread", GPU)]


@pytest.mark.parametrize("name", device_module.GPU_RESTRICTIONS)
def test_a_rank_that_sees_its_own_gpu_alone_takes_it(gpus, name):
    gpus(1, LOCAL_RANK="3", **{name: "1"})
    assert choose_device() == torch.device("cuda", 0)


@pytest.mark.parametrize(("count", "environment"), [(1, {}), (2, {"CUDA_VISIBLE_DEVICES": "0,1"})])
def test_a_rank_without_a_gpu_is_refused(gpus, count, environment):
    gpus(count, LOCAL_RANK="3", **environment)
    with pytest.raises(UserError, match=f"local rank 3 has no GPU: this machine has {count}"):
        choose_device()


def test_the_allocator_uses_expandable_segments_unless_told_otherwise(gpus, monkeypatch):
    gpus(1)
    choose_device()
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    choose_device()
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "backend:cudaMallocAsync"
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    choose_device()
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ


def test_a_planning_thread_uses_the_gpu_of_its_rank(gpus):
    chosen = gpus(8)
    thread = threading.Thread(target=begin_planning_thread, args=(GPU,), name="plan")
    thread.start()
    thread.join()
    assert chosen == [("plan", GPU)]


def test_deepspeed_uses_the_same_gpu(monkeypatch):
    from xgram_dist.engine.deepspeed_internals import _set_device_variables

    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    monkeypatch.setenv("LOCAL_RANK", "3")
    _set_device_variables(torch.device("cpu"))
    assert os.environ["LOCAL_RANK"] == "3"
    _set_device_variables(torch.device("cuda", 0))
    assert os.environ["LOCAL_RANK"] == "0"


def test_nccl_is_bound_to_the_gpu_and_gloo_to_none():
    assert collective_options(GPU) == {"backend": "nccl", "device_id": GPU}
    assert collective_options(torch.device("cpu")) == {"backend": "gloo"}


def test_deterministic_is_strict_and_does_not_fill_empty_tensors(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        make_deterministic(True)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        make_deterministic(False)
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


# Process groups beside NCCL


def test_ranks_that_share_a_gpu_are_refused(monkeypatch):
    from xgram_dist.parallel import mesh

    store, begun = dist.HashStore(), []
    monkeypatch.setattr(mesh, "read_place", lambda: Place(len(begun), 3))
    monkeypatch.setattr(mesh, "open_store", lambda *_: store)
    monkeypatch.setattr(mesh, "meet", lambda *_: None)
    monkeypatch.setattr(dist, "init_process_group", lambda **options: begun.append(options))
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: None)
    monkeypatch.setattr(mesh, "gpu_id", lambda device: f"gpu {device.index}")
    mesh.init_world(GPU)
    mesh.init_world(torch.device("cuda", 1))
    assert [(one["backend"], one["device_id"].index) for one in begun] == [("nccl", 3), ("nccl", 1)]
    with pytest.raises(UserError, match="rank 2 shares a GPU with another rank"):
        mesh.init_world(GPU)
    assert len(begun) == 2


def test_only_members_make_a_gloo_group_beside_a_bound_nccl_world(monkeypatch):
    """A rank outside it would wait in torch for a split of NCCL's communicator."""
    from xgram_dist.parallel import mesh
    from xgram_dist.parallel.process_group import ProcessGroup

    made = []

    def new_group(members, backend="nccl", use_local_synchronization=False, **_):
        made.append((members, backend, use_local_synchronization))

    monkeypatch.setattr(dist, "new_group", new_group)
    group = mesh._build_axis(ProcessGroup(2, 4), [[0, 1], [2, 3]])
    assert (group.rank, group.size) == (0, 2)
    assert made == [([0, 1], "nccl", False), ([2, 3], "nccl", False), ([2, 3], "gloo", True)]


@pytest.mark.parametrize(("backend", "uses_host"), [("nccl", True), ("gloo", False)])
@pytest.mark.parametrize("memory", [{"optimizer": "adagrad"}, {"optimizer": "catch_up"}])
def test_tables_in_host_memory_reduce_over_gloo(monkeypatch, backend, uses_host, memory):
    import tiny_models as tiny

    from xgram_dist.model.build import build_lookup
    from xgram_dist.parallel.mesh import single_mesh
    from xgram_dist.parallel.process_group import ProcessGroup

    monkeypatch.setattr(dist, "get_backend", lambda group: group)
    tensor = ProcessGroup(0, 2, backend, host=ProcessGroup(0, 2, "gloo"))
    config = tiny.config(memory={"placement": "host", **memory}, parallel={"engine": "replicated", "tensor": 2})
    lookup = build_lookup(config, tiny.routing(config), tiny.CPU, replace(single_mesh(), tensor=tensor))
    expected = tensor.host if uses_host else tensor
    for shard in lookup.shards:
        assert shard.tensor_group is expected
        if memory["optimizer"] == "adagrad":
            assert shard.row_optimizer._columns is expected
    assert tensor.for_device(GPU) is tensor
    lookup.close()
