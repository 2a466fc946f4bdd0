"""Prime numbers of rows, so that hash heads of one n-gram collide differently."""

from functools import lru_cache


@lru_cache
def primes_from(least: int, count: int) -> tuple[int, ...]:
    """The first `count` primes that are at least `least`, ascending."""
    found: list[int] = []
    number = max(2, least)
    while len(found) < count:
        if all(number % divisor for divisor in range(2, int(number**0.5) + 1)):
            found.append(number)
        number += 1
    return tuple(found)
