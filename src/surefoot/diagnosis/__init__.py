"""From what a run recorded to what went wrong: `surefoot doctor`. Runs nothing, changes nothing."""
