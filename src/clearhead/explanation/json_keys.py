"""Keys of JSON output: snake_case in place of the names that tables and figures display."""

import re
from collections.abc import Mapping
from typing import Any


def to_snake_case_keys(value: Any) -> Any:
    """Replace spaces and punctuation in the keys of nested mappings by underscores.

    Args:
        value: Any nested value.

    Returns:
        The same value with changed keys. Tuples become lists.

    Example:
        >>> to_snake_case_keys([{"p of τ(last row, gradient)": 0.1, "input-x-gradient": 1}])
        [{'p_of_τ_last_row_gradient': 0.1, 'input-x-gradient': 1}]
    """
    if isinstance(value, Mapping):
        return {to_snake_case(key): to_snake_case_keys(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_snake_case_keys(item) for item in value]
    return value


def to_snake_case(name: Any) -> str:
    """Return a name as a JSON key: names without spaces and capital letters stay unchanged.

    Args:
        name: The name of a metric or setting.

    Returns:
        The key.

    Example:
        >>> to_snake_case("median JSD of the mean head"), to_snake_case("TVD, layer 0")
        ('median_JSD_of_the_mean_head', 'TVD_layer_0')
    """
    if " " not in str(name):
        return str(name)
    return re.sub(r"[^\w-]+", "_", str(name)).strip("_")
