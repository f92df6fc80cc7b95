"""Covering selections: a few cases in which every pair of values that can occur together occurs. Deterministic."""

from itertools import combinations
from random import Random


def covering(factors, constraints=()):
    """The cases, as dicts. `factors`: {name: values}; `constraints`: (names, predicate over their values)."""
    uncovered = possible_pairs(factors, constraints)
    cases = []
    while uncovered:
        seed = dict(next(iter(uncovered)))
        case = _complete(seed, factors, constraints, uncovered)
        uncovered = {pair: None for pair in uncovered if not _contains(case, pair)}
        cases.append({name: case[name] for name in factors})
    return cases


def possible_pairs(factors, constraints=()):
    """Every pair of values that some case can hold, in order, as {((name, value), (name, value)): None}."""
    pairs = {}
    for one, other in combinations(factors, 2):
        for a in factors[one]:
            for b in factors[other]:
                if _complete({one: a, other: b}, factors, constraints, {}):
                    pairs[(one, a), (other, b)] = None
    return pairs


def _complete(case, factors, constraints, uncovered):
    """The case with all factors set to values that cover new pairs, or None if no value is legal."""
    if not _legal(case, constraints):
        return None
    missing = [name for name in factors if name not in case]
    if not missing:
        return case
    name = missing[0]
    gains = {value: _gain(case, name, value, uncovered) for value in factors[name]}
    # Ties are broken by a seeded draw, which repeats no value systematically.
    drawn = Random(f"{name} {len(uncovered)}").sample(factors[name], len(factors[name]))
    for value in sorted(drawn, key=gains.get, reverse=True):
        found = _complete(case | {name: value}, factors, constraints, uncovered)
        if found:
            return found
    return None


def _gain(case, name, value, uncovered):
    new = (name, value)
    return sum((old, new) in uncovered or (new, old) in uncovered for old in case.items())


def _legal(case, constraints):
    return all(
        predicate(*(case[name] for name in names))
        for names, predicate in constraints
        if all(name in case for name in names)
    )


def _contains(case, pair):
    return all(case[name] == value for name, value in pair)
