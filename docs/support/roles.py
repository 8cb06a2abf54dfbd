"""A griffe extension for the house's docstrings: :class:`~vtensor.Pool` becomes a link to its place in the
reference, and `a, b: text` in a section of arguments or errors stands for each of them."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|attr|mod|data):`(~?)([\w.]+)`")
_SEVERAL = re.compile(r"^(?P<indent> +)(?P<names>\w+(?:, \w+)+): (?P<text>.*(?:\n(?P=indent) +\S.*)*)$", re.M)
_PUBLIC = ("vtensor.", "integrations.")


class HouseStyle(griffe.Extension):
    """Rewrites the docstrings of everything that is loaded."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is None:
            return
        text = _ROLE.sub(lambda match: _link(obj, match[1], match[2]), obj.docstring.value)
        text = _SEVERAL.sub(lambda match: _one_each(obj, match), text)
        obj.docstring.value = re.sub(r"::\n\n(?=    )", ":\n\n", text).replace("\n\n:\n\n", "\n\n")


def _link(obj: griffe.Object, shortened: str, name: str) -> str:
    target = name.replace("vtensor.integrations.", "integrations.")
    if not target.startswith(_PUBLIC):
        first = target.split(".")[0]
        siblings = obj.parent if obj.parent is not None and obj.parent.is_class else obj
        if first in siblings.members:
            target = f"{siblings.path}.{target}"
        elif first in obj.module.members and not obj.module.members[first].is_alias:
            target = f"{obj.module.path}.{target}"
        else:
            target = f"vtensor.{target}"
    return f"[`{name.split('.')[-1] if shortened else name}`][{target}]"


def _one_each(obj: griffe.Object, match: re.Match[str]) -> str:
    starred = {}
    if isinstance(obj, griffe.Function):
        starred = {parameter.name.lstrip("*"): parameter.name for parameter in obj.parameters}
    names = [starred.get(name, name) for name in match["names"].split(", ")]
    return "\n".join(f"{match['indent']}{name}: {match['text']}" for name in names)
