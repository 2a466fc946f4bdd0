"""Print requirements.lock from a report of `pip install --dry-run --report` (`make lock`).

The environment is then installed from the pinned list without resolving (`pip install --no-deps`), which saves minutes.
torchvision is left out: mosaicml-streaming requires it, but this project does not use it, and it cannot be imported
with a CPU build of torch (xgram_dist/data/streaming_import.py).
"""

import argparse
import json
import sys

LEFT_OUT = {"torchvision", "xgram-dist"}
# Only CUDA builds of torch need these; a lock file made with one must not install them elsewhere.
LEFT_OUT_PREFIXES = ("nvidia-", "cuda-")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", help="file written by pip install --dry-run --ignore-installed --report")
    args = parser.parse_args()
    with open(args.report, encoding="utf-8") as file:
        installed = json.load(file)["install"]
    pins = {}
    for item in installed:
        name = item["metadata"]["name"].lower().replace("_", "-")
        if name not in LEFT_OUT and not name.startswith(LEFT_OUT_PREFIXES):
            pins[name] = item["metadata"]["version"].partition("+")[0]  # 2.13.0+cpu is the release 2.13.0
    print("# Made by `make lock`; do not edit. Install with: pip install --no-deps -r requirements.lock")
    for name in sorted(pins):
        print(f"{name}=={pins[name]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
