"""What a run leaves behind and what a person sees of it. Reads reports; never changes a run."""
