"""What is measured beside an update: times and sampled signals. It changes no number of it."""
