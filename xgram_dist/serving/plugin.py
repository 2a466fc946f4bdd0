"""The entry point `vllm.general_plugins`: vLLM calls `register` in each of its processes, before it reads a model."""

from typing import Any


def register() -> None:
    """Make vLLM read our configuration, and find our model, which is imported when a model of ours is loaded."""
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from xgram_dist.inference.hf.configuration_xgram import XgramConfig

    AutoConfig.register("xgram", XgramConfig, exist_ok=True)
    ModelRegistry.register_model("XgramForCausalLM", "xgram_dist.serving.model:XgramForCausalLM")
    MODELS_CONFIG_MAP["XgramForCausalLM"] = WithoutGraphs


class WithoutGraphs:
    """How a model with tables changes vLLM's settings: the host reads rows in the forward pass, which a CUDA graph
    would leave out when it is replayed."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        from vllm.config import CUDAGraphMode

        if vllm_config.model_config.hf_config.tables:
            vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Nothing."""
