"""What a run leaves on disk and shows to a person. Reads reports; never changes a run."""
