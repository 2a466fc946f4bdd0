"""Hugging Face configuration of an X-gram model. An exported folder holds a copy of this file."""

from typing import Any

from transformers import PretrainedConfig


class XgramConfig(PretrainedConfig):  # type: ignore[misc]
    model_type = "xgram"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(
        self,
        spec: dict[str, Any] | None = None,
        tables: list[dict[str, Any]] | None = None,
        accesses: list[int] | None = None,
        row_format: str = "fp32",
        keys: list[int] | None = None,
        **kwargs: Any,
    ):
        """`spec`: see `decoder.Spec`. `tables`: name, rows, width and view of each. `accesses`: length of each view's
        access lists; empty where row = token id. `row_format`: see `decoder_tables.RowFormat`. `keys`: sizes of the
        arrays by which n-grams are looked up."""
        self.keys = keys or []
        self.spec, self.tables, self.accesses, self.row_format = spec or {}, tables or [], accesses or [], row_format
        # Under the names that transformers and other tools read.
        self.vocab_size = self.spec.get("vocabulary", 0)
        self.hidden_size = self.spec.get("width", 0)
        self.intermediate_size = self.spec.get("ffn_width", 0)
        self.num_hidden_layers = self.spec.get("layers", 0)
        self.num_attention_heads = self.spec.get("heads", 0)
        self.num_key_value_heads = self.spec.get("kv_heads", 0)
        self.head_dim = self.spec.get("head_width") or self.hidden_size // max(1, self.num_attention_heads)
        self.max_position_embeddings = self.spec.get("context", 0)
        super().__init__(**{"tie_word_embeddings": False, **kwargs})
