"""Make text from peers and files safe to show: on a terminal, in a log, in an error that we print.

Control characters can move the cursor, rename the window and hide text; format characters can reverse the direction of
text. Both become escapes such as `\\x1b`, so that the reader sees what came. This module does not handle rich's markup:
callers that print with rich use `Text`, or turn it off.
"""

from __future__ import annotations

import json
import unicodedata

_HARMFUL = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))  # control, format (bidirectional, too), surrogates, line ends


def shown(text: object, *, lines: bool = False) -> str:
    """Return the text with harmful characters escaped; `lines` keeps line ends and tabs, as in a traceback."""
    text = str(text)
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char.encode("unicode_escape").decode("ascii") if _is_harmful(char) and not (lines and char in "\n\t") else char
        for char in text
    )


def _is_harmful(character: str) -> bool:
    return not character.isprintable() and unicodedata.category(character) in _HARMFUL


def shown_json(value: object) -> str:
    """Return the value as one line of JSON, with harmful characters escaped, so that it parses to the same strings."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    if text.isprintable():
        return text
    # JSON has such characters only inside strings.
    return "".join(json.dumps(char)[1:-1] if _is_harmful(char) else char for char in text)
