"""Text of peers and files as it may be shown to people: on a terminal, in a log, in an error that we print.

Control characters move the cursor, rename the window and hide what stands before them; those of formatting turn the
direction of text around. Both become escapes such as `\\x1b`, so that one sees what came. Whoever shows it with rich
gives it as a `Text`, or through `rich.markup.escape` too: rich's markup is not this module's business.
"""

from __future__ import annotations

import json
import unicodedata

_HARMFUL = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))  # control, format (bidirectional, too), surrogates, line ends


def shown(text: object, *, lines: bool = False) -> str:
    """The text without what a terminal would obey; with `lines`, line ends and tabs stay, as in a traceback."""
    found = str(text)
    if found.isascii() and found.isprintable():
        return found
    return "".join(each if (lines and each in "\n\t") or not _is_harmful(each) else _escaped(each) for each in found)


def _is_harmful(character: str) -> bool:
    return not character.isprintable() and unicodedata.category(character) in _HARMFUL


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def shown_json(found: object) -> str:
    """The object as JSON on one line, whose texts are what they were, and nothing in it what a terminal would obey."""
    text = json.dumps(found, ensure_ascii=False, default=str)
    if text.isprintable():
        return text
    # Between its texts JSON is plain; so what is replaced is inside of one.
    return "".join(json.dumps(each)[1:-1] if _is_harmful(each) else each for each in text)
