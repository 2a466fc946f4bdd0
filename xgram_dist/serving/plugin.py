"""The entry point `vllm.general_plugins`: vLLM calls `register` in each of its processes, before it reads a model."""


def register() -> None:
    """Make vLLM read our configuration, and find our model, which is imported when a model of ours is loaded."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from xgram_dist.inference.hf.configuration_xgram import XgramConfig

    AutoConfig.register("xgram", XgramConfig, exist_ok=True)
    ModelRegistry.register_model("XgramForCausalLM", "xgram_dist.serving.model:XgramForCausalLM")
