"""The runtimes that a sweep can measure: tahq, the usual alternative, and a control."""
