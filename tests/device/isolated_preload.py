"""Imported by the fork server before all else: the guard must be there when torch is imported."""

import sys

if "torch" not in sys.modules:
    from stub_cuda import Ledger, load_guard, stub_torch_cuda

    load_guard()

    import torch.testing._internal.distributed.fake_pg
    from torch._subclasses import FakeTensorMode  # noqa: F401

    import xgram_dist.train.trainer  # noqa: F401
    from xgram_dist.engine.deepspeed_internals import import_deepspeed

    stub_torch_cuda(Ledger())  # a process has its own; DeepSpeed looks for a GPU when it is imported
    import_deepspeed(torch.device("cuda", 0))

    torch.set_num_threads(1)
