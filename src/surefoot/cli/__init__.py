"""The command: one thin file for each verb. Decides nothing that the library does not decide."""
