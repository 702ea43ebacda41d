"""One self-contained HTML page for a run, or for several side by side. It reads run folders and
judges nothing itself: verdicts come from `judge`, findings from `diagnosis`."""
