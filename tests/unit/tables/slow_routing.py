"""The routing rules as a literal loop over tokens, in exact arithmetic and with dictionaries: slow, and independent
of the package, which is what makes it a reference. Bucket weights are whole numbers, so no comparison can round."""

from fractions import Fraction

MULTIPLIERS = [
    11400714819323198485,
    14313749767032793493,
    18397679294719823053,
    13627969195753728349,
    7109453100751438417,
    1609587929392839161,
    15404834773449339307,
    10041221585803275913,
]


def slow_routing(weights, *, vip, buckets, rows, paths, copies, decay, view):
    """({token: {row: coefficient}}, tokens per bucket, rows per region) for whole-numbered frequency^alpha."""
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    accesses = {}
    slots = {}
    for rank, token in enumerate(order[:vip]):
        slots[token] = [rank] + [vip + rank * copies + c for c in range(copies)]

    total = sum(weights[token] for token in order[vip:])
    members = [[] for _ in range(buckets)]
    bucket, accumulated = 0, 0
    for token in order[vip:]:
        while bucket < buckets - 1 and Fraction(accumulated) >= Fraction((bucket + 1) * total, buckets):
            bucket += 1
        members[bucket].append(token)
        accumulated += weights[token]

    region = (rows - vip * (1 + copies)) // buckets
    for number, tokens in enumerate(members):
        start = vip * (1 + copies) + number * region
        if len(tokens) > region:
            for token in tokens:
                accesses[token] = {}
                for path in range(paths):
                    product = token * MULTIPLIERS[(view * paths + path) % 8] % 2**64
                    row = start + product % 2**63 % region
                    accesses[token][row] = accesses[token].get(row, 0) + 1.0
            continue
        for position, token in enumerate(tokens):
            slots[token] = [start + position]
        spare = list(range(start + len(tokens), start + region))
        for _ in range(copies):
            for token in tokens:
                if spare:
                    slots[token].append(spare.pop(0))

    for token, its_rows in slots.items():
        weight = [decay**c for c in range(len(its_rows))]
        accesses[token] = {row: paths * w / sum(weight) for row, w in zip(its_rows, weight, strict=True)}
    return accesses, [len(tokens) for tokens in members], region
