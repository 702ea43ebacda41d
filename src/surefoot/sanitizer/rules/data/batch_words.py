"""What a script says of batches: whether it draws any, and how large they are."""

from __future__ import annotations

import functools
import io
import linecache
import re
import tokenize

BATCH = re.compile(r"batch(?!_?norm|_?first|mean|ed)|^(bs|xb|yb)$", re.IGNORECASE)
LONGEST_OPTION = 24
WHOLE = re.compile(r"full[ _-]?batch|overfit|memori[sz]|whole (data|set|batch)", re.IGNORECASE)


@functools.lru_cache(maxsize=64)
def batch_sizes(file: str) -> frozenset[int] | None:
    """Numbers on lines of a script that name a batch; None where it means to use all data."""
    text = "".join(linecache.getlines(file))
    if WHOLE.search(text):
        return None
    names: set[int] = set()
    numbers: dict[int, set[int]] = {}
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            line = token.start[0]
            is_option = token.type == tokenize.STRING and len(token.string) < LONGEST_OPTION
            if (token.type == tokenize.NAME or is_option) and BATCH.search(token.string):
                names.add(line)
            elif token.type == tokenize.NUMBER and token.string.isdecimal():
                numbers.setdefault(line, set()).add(int(token.string))
    except (tokenize.TokenError, SyntaxError):
        return None
    return frozenset(number for line in names for number in numbers.get(line, ()))
