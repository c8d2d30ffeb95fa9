"""Read the documentation of each field of the schema: the string below it in the source.

It is read from the source text when the JSON Schema and the pages are generated, so that there is no second copy.
"""

import ast
import inspect
from functools import cache

from nodeagent.config import own_limit, schema

_MODULES = (schema, own_limit)


def field_doc(owner: type, field: str) -> str:
    """The field's documentation on one line. Raises KeyError if it has none."""
    return _docs()[owner.__name__, field]


@cache
def _docs() -> dict[tuple[str, str], str]:
    found = {}
    for node in [node for module in _MODULES for node in ast.parse(inspect.getsource(module)).body]:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, below in zip(node.body, node.body[1:], strict=False):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                found[node.name, field.target.id] = " ".join(str(below.value.value).split())
    return found
