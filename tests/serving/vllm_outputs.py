"""Run in the environment of `make serving`: python vllm_outputs.py JOBS.json OUT.json.

A job names an exported folder, options of `LLM`, and batches of prompts (token ids), one after another. The output of
a job is the number of preemptions, and a list for each batch: the new tokens of each prompt, and the log-probability of
each."""

import gc
import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler


class Preemptions:
    """Counts them."""

    def __init__(self) -> None:
        self.count = 0
        preempt = Scheduler._preempt_request

        def counted(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            return preempt(*arguments, **options)

        Scheduler._preempt_request = counted


PREEMPTIONS = Preemptions()


def outputs(job: dict[str, Any]) -> dict[str, Any]:
    options = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 256, "kv_cache_memory_bytes": 1 << 28}
    llm = LLM(job["folder"], skip_tokenizer_init=True, **options | job.get("options", {}))
    sampling = SamplingParams(
        temperature=0, max_tokens=job["max_tokens"], ignore_eos=True, logprobs=1, detokenize=False
    )
    made, before = [], PREEMPTIONS.count
    for prompts in job["batches"]:
        results = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        made.append(
            [
                {
                    "tokens": list(result.outputs[0].token_ids),
                    "logprobs": [
                        step[token].logprob
                        for step, token in zip(result.outputs[0].logprobs, result.outputs[0].token_ids, strict=True)
                    ],
                    "cached": result.num_cached_tokens,
                }
                for result in results
            ]
        )
    del llm
    gc.collect()
    return {"preemptions": PREEMPTIONS.count - before, "batches": made}


if __name__ == "__main__":
    jobs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(json.dumps([outputs(job) for job in jobs]), encoding="utf-8")
