"""Configs and test ids of cases."""

import re


def config_of(method, size, layout="zigzag", kernel="torch"):
    """The value of the JSON key."""
    config = {"size": size, "method": method, "layout": layout, "kernel": kernel}
    return config | ({"ulysses_size": 2} if method == "hybrid" else {})


def name_of(case):
    """A test id from the values of a case."""
    return re.sub(r"torch\.|[' ]", "", "-".join(map(str, case.values())))
