"""What makes a model fit: trades of time for memory. None of them changes a number."""
