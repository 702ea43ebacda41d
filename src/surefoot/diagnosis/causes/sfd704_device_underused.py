"""SFD704: the device is often idle."""

from __future__ import annotations

import numpy as np

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.signals import SHORTEST, Signals

BUSY = 0.7


class DeviceUnderused(Cause):
    """The device is busy for less than 70 % of the time."""

    info = CauseInfo(
        code="SFD704",
        slug="device-underused",
        severity=Severity.HINT,
        certainty=Certainty.STRONG,
        title="The device is busy for less than 70 % of the time.",
        observes="The median of the recorded utilisation. Quiet where the data are late: that is"
        " its own cause.",
        why="Small batches leave the kernels short and the host behind; one synchronisation in"
        " each update (.item(), print of a tensor) stops it; work of Python on the host holds it"
        " up.",
        fix="A larger micro-batch; compile the model; bf16; read numbers later in place of"
        " .item(); `surefoot profile` shows the gaps.",
        source="https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
        needs=("device_utilization",),
    )

    def look(self, signals: Signals) -> Verdict | None:
        if str(signals.recording.facts.get("device", "")).startswith("cpu"):
            return None  # What is recorded there is the load of the machine.
        shares = signals.recording["device_utilization"].finite.values
        if len(shares) < SHORTEST:
            return None
        usual = float(np.median(shares[len(shares) // 10 :]))
        if usual >= BUSY:
            return None
        return Verdict(
            f"The device was busy {usual:.0%} of the time (median of {len(shares)} rows; highest"
            f" {shares.max():.0%}).",
            weight=0.6,
            evidence={"median": usual, "highest": float(shares.max()), "rows": len(shares)},
        )
