"""From model, data, task and settings to the parts of a run. It builds once and writes nothing."""
