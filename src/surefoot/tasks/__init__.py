"""What a loss means: each task gives the weight, the loss sum and the metric sums of a batch."""
