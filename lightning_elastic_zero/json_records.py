"""A JSON text that vouches for itself: its field ``digest`` is that of all its other bytes.

Everything else in a checkpoint has its checksum in the manifest; nothing but the manifest itself
can say whether one of its own numbers was changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

DIGEST_FIELD = "digest"
"""The field that holds it."""

_BLANK = "0" * hashlib.sha256().digest_size * 2
"""What stands in the digest's place while it is computed."""


def dump_with_digest(content: Mapping[str, Any]) -> str:
    """Give the text of a JSON object, sorted and indented, with its digest in it."""
    text = json.dumps({**content, DIGEST_FIELD: _BLANK}, indent=1, sort_keys=True) + "\n"
    mark = f'"{DIGEST_FIELD}": "{_BLANK}"'
    return text.replace(mark, mark.replace(_BLANK, _digest(text)), 1)


def has_valid_digest(text: str, content: Mapping[str, Any]) -> bool:
    """Tell whether a text, whose content was read already, has the digest that it names."""
    named = content.get(DIGEST_FIELD)
    if not isinstance(named, str) or len(named) != len(_BLANK):
        return False
    return _digest(text.replace(named, _BLANK)) == named


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
