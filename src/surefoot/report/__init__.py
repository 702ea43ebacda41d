"""Self-contained HTML pages of one run or of several. Reads run folders and judges nothing itself:
verdicts come from `judge`, findings from `diagnosis`."""
