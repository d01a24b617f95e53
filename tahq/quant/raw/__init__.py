"""The values themselves."""
