"""One run in its folder: start or resume, train, save, record, end."""
