"""A model exported by `xgram-dist export` in vLLM. Only vLLM imports this package, through its plugin entry point."""
