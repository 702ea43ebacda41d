"""What every test shares: one torch thread, so that neighbours change neither result nor time."""

from __future__ import annotations

import os

# Read when torch is first imported, here and in every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
