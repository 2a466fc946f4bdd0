"""Resolve the project's dependencies once and pin them: `make lock`.

Set-up then installs the pinned list without resolving (`pip install --no-deps`), which takes minutes less. Left
out: torchvision, which mosaicml-streaming asks for but this project never uses, and which does not import beside a
CPU build of torch (xgram_dist/data/streaming_import.py). Prints the lock file; the report of pip is its input.
"""

import argparse
import json
import sys

LEFT_OUT = {"torchvision", "xgram-dist"}
# A CPU build of torch has no CUDA packages; a lock made beside a CUDA build must not force them on others.
LEFT_OUT_PREFIXES = ("nvidia-", "cuda-", "triton")


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
            pins[name] = item["metadata"]["version"].partition("+")[0]  # 2.13.0+cpu and 2.13.0 are one release
    print("# Made by `make lock`; do not edit. Install with: pip install --no-deps -r requirements.lock")
    for name in sorted(pins):
        print(f"{name}=={pins[name]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
