"""The command line: one thin file per command. All decisions are the library's."""
