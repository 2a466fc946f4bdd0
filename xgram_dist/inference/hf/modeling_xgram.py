"""Hugging Face model of X-gram: the decoder, its tables and the token -> row map. An exported folder holds a copy.

model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_xgram import XgramConfig
from .decoder import Decoder, Spec
from .decoder_batched_sites import BatchedSites  # noqa: F401  (transformers copies just the files that are named here)
from .decoder_layers import ConvolutionCache
from .decoder_methods import KeyMap
from .decoder_tables import Tables


class XgramCache(ConvolutionCache, DynamicCache):  # type: ignore[misc]
    """Keys and values, and the last retrieved vectors of each view."""

    def __init__(self) -> None:
        DynamicCache.__init__(self)
        ConvolutionCache.__init__(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        DynamicCache.reorder_cache(self, beam_idx)  # type: ignore[arg-type]
        self.unstack()
        self.recent = {name: kept.index_select(0, beam_idx.to(kept.device)) for name, kept in self.recent.items()}
        if self.documents is not None and self.next_document is not None:
            self.documents = self.documents.index_select(0, beam_idx.to(self.documents.device))
            self.next_document = self.next_document.index_select(0, beam_idx.to(self.next_document.device))


class XgramForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    config_class = XgramConfig
    _is_stateful = True  # a step of generation cannot be undone
    _no_split_modules = ["Block"]  # noqa: RUF012

    def __init__(self, config: XgramConfig):
        super().__init__(config)
        spec = Spec.of(config.spec)
        site = spec.method_site
        self.decoder = Decoder(spec)
        self.key_map = KeyMap(site, spec.document_end, config.keys) if config.keys and site else None
        self.tables = Tables(config.tables, config.accesses, config.vocab_size, config.row_format)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Weights come from training."""

    def get_input_embeddings(self) -> None:  # type: ignore[override]
        return None

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder.head

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *_: Any, **__: Any
    ) -> Any:
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = XgramCache()

    def retrieve(self, input_ids: Tensor, cache: Any, real: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """(the slot of each token, the vectors of the distinct tokens or other keys by table)."""
        if not self.config.tables:
            return input_ids, {}
        keys = input_ids
        if self.key_map is not None:
            keys = self.key_map(input_ids, None if real is None else real[:, -input_ids.shape[1] :], cache)
        keys_U, slots = keys.unique(return_inverse=True)
        return slots, self.tables.by_name(self.tables(keys_U))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        **_: Any,
    ) -> Any:
        if use_cache is None:
            use_cache = not self.training
        if past_key_values is not None and not isinstance(past_key_values, XgramCache):
            if past_key_values.get_seq_length():
                raise ValueError("past_key_values must be those that this model returned")
            past_key_values = None
        cache = (past_key_values or XgramCache()) if use_cache or past_key_values is not None else None
        real = None if attention_mask is None or bool(attention_mask.all()) else attention_mask.bool()
        hidden = self.decoder(input_ids, *self.retrieve(input_ids, cache, real), cache, real)
        logits = self.decoder.logits(hidden[:, -logits_to_keep:] if logits_to_keep else hidden)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        if return_dict is False:
            return tuple(part for part in (loss, logits, cache) if part is not None)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)  # type: ignore[arg-type]
