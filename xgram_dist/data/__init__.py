"""Documents to tokens to batches. `streaming_import` is the only module that imports mosaicml-streaming."""
