"""The commands, one module each; `main(arguments)` of each returns the exit code."""
