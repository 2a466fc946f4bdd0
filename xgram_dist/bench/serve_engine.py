"""One engine of vLLM for `bench serve`: a process of the environment of serving that reads commands and answers.

python -m xgram_dist.bench.serve_engine FOLDER OPTIONS: a JSON object a line, in and out. A command has either prompts
(token ids) and the number of new tokens of each, or the folder of a cgroup to enter. The end of the input ends it.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

from xgram_dist.bench.memory_limit import MemoryLimit


class Engine:
    def __init__(self, folder: str, options: dict[str, Any]):
        start = time.perf_counter()
        fixed = {"dtype": "float32", "skip_tokenizer_init": True, "enable_prefix_caching": False, "seed": 0}
        self.llm = LLM(folder, **fixed | options)
        self.start_seconds = time.perf_counter() - start
        self._number = 0

    def run(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """Seconds until each prompt has its first token; seconds of the steps after that; the new tokens."""
        engine = self.llm.llm_engine
        sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        names = [str(self._number + order) for order in range(len(prompts))]
        self._number += len(prompts)
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        counts, made = dict.fromkeys(names, 0), {}
        start = time.perf_counter()
        first = steps = 0.0
        num_steps = 0
        while engine.has_unfinished_requests():
            decoding, before = min(counts.values()) > 0, time.perf_counter()
            outputs = engine.step()
            now = time.perf_counter()
            if decoding:
                steps, num_steps = steps + now - before, num_steps + 1
            for output in outputs:
                counts[output.request_id] = len(output.outputs[0].token_ids)
                made[output.request_id] = list(output.outputs[0].token_ids)
            if not decoding and min(counts.values()) > 0:
                first = now - start
        return {"prefill": first, "decode": steps, "steps": num_steps, "tokens": [made[name] for name in names]}


def main() -> None:
    # vLLM writes to the standard output too; answers keep one of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(tree: dict[str, Any]) -> None:
        answers.write(json.dumps(tree) + "\n")
        answers.flush()

    engine = Engine(sys.argv[1], json.loads(sys.argv[2]))
    answer({"start_seconds": engine.start_seconds})
    for line in sys.stdin:
        command = json.loads(line)
        if "cgroup" in command:
            MemoryLimit(0, Path(command["cgroup"])).enter()
            answer({})
        else:
            answer(engine.run(command["prompts"], command["new_tokens"]))


if __name__ == "__main__":
    main()
