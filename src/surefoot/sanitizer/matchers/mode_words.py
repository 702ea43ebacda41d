"""What the user's own lines last said of the mode of each module."""

from __future__ import annotations

import weakref

from torch import nn

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import Site
from surefoot.sanitizer.listener import Listener

MOST_WORDS = 256


class ModeWords(Listener):
    """The latest `train()` or `eval()` of each module that the user called it on."""

    def setup(self) -> None:
        self._words: dict[int, tuple[weakref.ref[nn.Module], bool, Site]] = {}

    def on_mode_changed(self, event: ev.ModeChanged) -> None:
        key = id(event.module)
        if event.by_user and (key in self._words or len(self._words) < MOST_WORDS):
            # The latest word comes last.
            self._words.pop(key, None)
            self._words[key] = weakref.ref(event.module), event.training, event.site

    def word_on(self, module: nn.Module) -> tuple[bool, Site] | None:
        """The latest word on the module or on one that it is part of; None for none."""
        for reference, training, site in reversed(self._words.values()):
            spoken = reference()
            if spoken is not None and any(part is module for part in spoken.modules()):
                return training, site
        return None

    def is_part_of_training(self, module: nn.Module) -> bool:
        """Whether a larger module, of which it is part, was put into train mode and is there."""
        for reference, training, _ in self._words.values():
            whole = reference()
            if whole is None or whole is module or not training or not whole.training:
                continue
            if any(part is module for part in whole.modules()):
                return True
        return False
