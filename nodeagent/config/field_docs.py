"""The documentation of each field of the schema: the string that stands under it in the source.

Read from the source text when the JSON Schema or the pages are generated, so that there is no second copy to go stale.
"""

import ast
import inspect
from functools import cache

from nodeagent.config import schema


def field_doc(owner: type, field: str) -> str:
    """The field's documentation on one line. Raises KeyError when it has none: every key is documented."""
    return _docs()[owner.__name__, field]


@cache
def _docs() -> dict[tuple[str, str], str]:
    found = {}
    for node in ast.parse(inspect.getsource(schema)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, below in zip(node.body, node.body[1:], strict=False):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                found[node.name, field.target.id] = " ".join(str(below.value.value).split())
    return found
